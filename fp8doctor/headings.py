"""The head of every check: code, name, area, severity and page.

Read from the text of the files because importing all of them is too slow for a list. If a check is not the
package's own, the registry supplies the same. `fired` tells how often a check fired on public recipes, as
``research/recipes`` counted it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8doctor.areas import AREAS, SEVERITIES
from fp8doctor.retired import RETIRED

if TYPE_CHECKING:
    from fp8doctor.registry import Check

HEAD = re.compile(
    r'@(?:kit\.)?check\(\s*"(?P<code>\w+)",\s*"(?P<name>[\w.+-]+)",'
    r'\s*severity="(?P<severity>\w+)"'
)
"""The registration of a rule."""

FORMERLY = re.compile(r'was=(?:"\w+"|\([^)]*\))')


class Heading(NamedTuple):
    """A check, as listed and explained."""

    code: str
    name: str
    area: str
    severity: str
    page: str
    """The check's page: the docstring of its file."""
    also: tuple[str, ...] = ()
    """Names of its other rules, and codes that they had as checks of their own."""

    @property
    def title(self) -> str:
        """Return the first line of the page."""
        return self.page.partition("\n")[0]


def headings(folders: Sequence[Path] = ()) -> tuple[Heading, ...]:
    """List the checks that `fp8doctor.registry.discover` finds, in its order.

    Raises the same `UserError`.
    """
    own = None if folders else _heads_of(_texts())
    if own is None:
        from fp8doctor.registry import discover

        rules = discover(folders)
        return tuple(
            _heading([each for each in rules if each.code == code])
            for code in dict.fromkeys(each.code for each in rules)
        )
    return tuple(sorted(own, key=lambda each: (AREAS.index(each.area), each.code)))


def _heading(rules: Sequence[Check]) -> Heading:
    """Describe the rules of one code."""
    first = rules[0]
    severity = max((each.severity for each in rules), key=SEVERITIES.index)
    also = (*(each.name for each in rules[1:]), *(code for each in rules for code in each.was))
    return Heading(first.code, first.name, first.area, severity, first.page, also)


def retired(codes: Iterable[str]) -> Iterator[Heading]:
    """Describe the codes that belong to no check any more, exactly as given."""
    for code in codes:
        if now := RETIRED.get(code.upper()):
            title = f"{code.upper()} is no check any more"
            yield Heading(
                code.upper(), "retired", "environment", "info", f"{title}\n\n{now[:1].upper()}{now[1:]}."
            )


def _texts() -> Iterator[tuple[str, str]]:
    """Read the area and the text of each check: its file, or all files of its folder, which has its page."""
    from fp8doctor import checks

    for folder in checks.__path__:
        for path in Path(folder).glob("*/[!_]*"):
            files = [path] if path.suffix == ".py" else sorted(path.glob("*.py"))
            if files:
                yield path.parent.name, "".join(each.read_text("utf-8") for each in files)


def _heads_of(texts: Iterator[tuple[str, str]]) -> list[Heading] | None:
    """Read the heads of checks; None if there is none or one cannot be read."""
    found = []
    for area, text in texts:
        heads = [each.groupdict() for each in HEAD.finditer(text)]
        _, _, rest = text.partition('"""')
        page, end, _ = rest.partition('"""')
        if not heads or not end or "\\" in page or area not in AREAS:
            return None
        former = re.findall(r'"(\w+)"', " ".join(FORMERLY.findall(text)))
        also = (*(each["name"] for each in heads[1:]), *former)
        severity = max((each["severity"] for each in heads), key=SEVERITIES.index)
        first = heads[0] | {"severity": severity, "area": area}
        found.append(Heading(**first, page=inspect.cleandoc(page), also=also))
    return found or None


@functools.cache
def counts() -> dict[str, Any]:
    """Read the counts that ship with the package."""
    import json

    found: dict[str, Any] = json.loads(Path(__file__).with_name("corpus.json").read_text("utf-8"))
    return found


def fired(code: str) -> str:
    """Write a sentence on how often a check raised a warning or error on the corpus.

    Empty for a check that raises neither, or is not part of this package.
    """
    of = counts()
    if code not in of["checks"]:
        return ""
    check = of["checks"][code]
    judged = f" (rightly: {check['rightly']}, false alarms: {check['false_alarm']})" if check["fired"] else ""
    return (
        f"Fired on {check['fired'] or 'none'} of {of['recipes']} public recipes{judged}, and on none of "
        f"{of['untouched_models']} untouched models."
    )
