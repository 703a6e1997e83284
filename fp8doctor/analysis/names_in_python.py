"""Many names of layers as the few sets that a script would write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

FIRST_NUMBER = re.compile(r"((?:.*?\.)?)(0|[1-9][0-9]*)((?:\..+)?)")
LAST_NUMBER = re.compile(r"((?:.*\.)?)(0|[1-9][0-9]*)((?:\.[^\d].*?)?)")
"""Name of a layer: what stands before the number of its block, the number, and what stands behind. A model in
stages has a second number: blocks are numbered within their stage."""


def names_in_python(names: Sequence[str]) -> list[str]:
    """Sets that hold these names together: one for what repeated blocks share, one for the rest."""
    ways = (_folded(names, pattern) for pattern in (FIRST_NUMBER, LAST_NUMBER))
    return min(ways, key=lambda sets: sum(map(len, sets)))


def _folded(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    """Write them folded over one of the numbers in each."""
    found: dict[tuple[str, str], list[int]] = {}
    alone = []
    for name in names:
        parts = pattern.fullmatch(name)
        if parts and (parts[1] or parts[3]):
            found.setdefault((parts[1], parts[3]), []).append(int(parts[2]))
        else:
            alone.append(name)
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (blocks, layer), numbers in found.items():
        alike.setdefault((blocks, tuple(sorted(numbers))), []).append(layer)
    sets = []
    for (blocks, (first, *more)), members in alike.items():
        last = first + len(more)
        if more == list(range(first + 1, last + 1)) and more:
            span = f"range({last + 1})" if first == 0 else f"range({first}, {last + 1})"
            sets.append(_comprehension(blocks, span, members))
        else:
            alone += [f"{blocks}{number}{layer}" for layer in members for number in (first, *more)]
    return sets + ([f"{{{', '.join(map(_quoted, alone))}}}"] if alone else [])


def _comprehension(blocks: str, span: str, layers: Sequence[str]) -> str:
    """Return the names of these layers in every block of the span."""
    if len(layers) == 1:
        return f'{{f"{_within(blocks)}{{i}}{_within(layers[0])}" for i in {span}}}'
    dotted = "." if all(layers) else ""  # an empty name is the block itself
    shown = ", ".join(_quoted(layer.removeprefix(dotted)) for layer in layers)
    return f'{{f"{_within(blocks)}{{i}}{dotted}{{layer}}" for i in {span} for layer in ({shown})}}'


def _quoted(name: str) -> str:
    """Write a name as a string; JSON's and Python's are written alike."""
    return json.dumps(name, ensure_ascii=False)


def _within(part: str) -> str:
    """Write a part of a name in an f-string."""
    return _quoted(part)[1:-1].replace("{", "{{").replace("}", "}}")
