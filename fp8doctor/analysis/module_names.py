"""Layer names in the code of a fix: sets of them, names under LoRA, compile marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from fp8doctor.analysis.layers import KEEP_IT_IN_MODULE, in_python, may_be_taken
from fp8doctor.facts import CompileMark, Facts, Linear, Network

FIRST_NUMBER = re.compile(r"((?:.*?\.)?)(0|[1-9][0-9]*)((?:\..+)?)")
LAST_NUMBER = re.compile(r"((?:.*\.)?)(0|[1-9][0-9]*)((?:\.[^\d].*?)?)")
"""Name of a layer: what stands before the number of its block, the number, and what stands behind. A model in
stages has a second number: blocks are numbered within their stage."""


def names_in_python(names: Sequence[str]) -> list[str]:
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
    if len(layers) == 1:
        return f'{{f"{_within(blocks)}{{i}}{_within(layers[0])}" for i in {span}}}'
    dotted = "." if all(layers) else ""  # an empty name is the block itself
    shown = ", ".join(_quoted(layer.removeprefix(dotted)) for layer in layers)
    return f'{{f"{_within(blocks)}{{i}}{dotted}{{layer}}" for i in {span} for layer in ({shown})}}'


def _quoted(name: str) -> str:
    """Write a name as a string; JSON's and Python's are written alike."""
    return json.dumps(name, ensure_ascii=False)


def _within(part: str) -> str:
    return _quoted(part)[1:-1].replace("{", "{{").replace("}", "}}")


BASE = ".base_layer"
"""Suffix that PEFT gives the name of a layer that it wraps."""
ROOT = "base_model.model."
"""Prefix that PEFT gives the name of every layer, in a model that it wraps whole."""
COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""Suffix that PEFT gives the name of a layer that it trains whole, and keeps a copy of."""
OF_LORA = "lora_"
"""Part of the names of LoRA's matrices, in PEFT and torchtune."""


def before_wrapping(names: Iterable[str], linears: Sequence[Linear]) -> list[str]:
    """Name layers as before LoRA; those trained whole also as now.

    LoRA's own matrices, which `kept_out` leaves out, are left out.
    """
    if has_lora(linears):
        names = [name for name in names if OF_LORA not in name]
    plain = [name.replace(BASE, "").removeprefix(ROOT) for name in names]
    return list(dict.fromkeys(each for name in plain for each in (COPY.sub("", name), name)))


MOST_LINES = 3
"""Lines that name layers which are in 16 bits anyway: a choice of length."""


def left_out_now(linears: Sequence[Linear]) -> tuple[list[str], str]:
    """Name the layers that no conversion took, in sets; if those are long, note them."""
    taken = [linear.name for linear in linears if may_be_taken(linear)]
    now = names_in_python(before_wrapping(taken, linears))
    return (now, "") if len(now) <= MOST_LINES else ([], "   # with what your filter leaves out now")


def keep(sets: Sequence[str]) -> list[str]:
    """Write the lines that collect the names of layers to leave out."""
    return [f"keep {'|=' if number else '='} {each}" for number, each in enumerate(sets)]


def kept_out(facts: Facts | None) -> str:
    """Write the condition under which a filter takes a layer that is not in ``keep``.

    A conversion passes names with the parts that wrappers added by then, so it may come before the wrapping
    or after it.
    """
    linears = facts.linears() if facts else ()
    adapters = f'"{OF_LORA}" not in name and ' if has_lora(linears) else ""
    return f"{adapters}name{''.join(_without_wrappers(facts, linears))} not in keep"


def _without_wrappers(facts: Facts | None, linears: Sequence[Linear]) -> Iterator[str]:
    """Write the calls that take the wrappers of this model out of a name, in an order that nests."""
    around = facts.get("network.wrappers", ()) if facts else ()
    marks = facts.get("training.compile_marks", ()) if facts else ()
    regions = facts.get("training.checkpointing", ()) if facts else ()
    if "OptimizedModule" in around or any(mark.get("form") == "wrapped" for mark in marks):
        yield '.replace("_orig_mod.", "")'
    if any(each.get("form") == "wrapper" for each in regions):
        yield '.replace("_checkpoint_wrapped_module.", "")'
    if any(each in KEEP_IT_IN_MODULE for each in around):
        yield '.removeprefix("module.")'
    if any(BASE in each.name for each in linears):
        yield f'.replace("{BASE}", "")'
    if any(each.name.startswith(ROOT) for each in linears):
        yield f'.removeprefix("{ROOT}")'


def has_lora(linears: Iterable[Linear]) -> bool:
    """Return whether LoRA's matrices wrap layers under names that tell them apart."""
    return any(each.get("adapter") == "adapter" and OF_LORA in each.name for each in linears)


def without_backend(bare: tuple[CompileMark, ...], network: Network) -> str:
    """Write the lines that compile modules in place by the default backend, or say what to change."""
    note = f"# without backend={bare[0].backend!r}"
    if any(mark.form != "in_place" for mark in bare):
        return f"{note}, in your call of torch.compile"
    names, model = [mark.name for mark in bare], in_python("", network)
    if len(names) == 1:
        return f"{in_python(names[0], network)}.compile()   {note}"
    found = " | ".join(names_in_python(names))
    return f"for name in {found}:\n    {model}.get_submodule(name).compile()   {note}"
