"""The head of every check: code, name, area, severity and page.

Read from the text of the files, because importing all of them is too slow for a list; those of other folders
come from the registry.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8doctor.areas import AREAS, RETIRED, SEVERITIES

if TYPE_CHECKING:
    from fp8doctor.registry import Check

HEAD = re.compile(
    r'@(?:kit\.)?check\(\s*"(?P<code>\w+)",\s*"(?P<name>[\w.+-]+)",\s*severity="(?P<severity>\w+)"'
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
        return self.page.partition("\n")[0]


def headings(folders: Sequence[Path] = ()) -> tuple[Heading, ...]:
    """List the checks as `fp8doctor.registry.discover` finds them. Raises the same `UserError`."""
    if folders:
        from fp8doctor.registry import discover

        return registered(discover(folders))
    return tuple(sorted(_own(), key=lambda each: (AREAS.index(each.area), each.code)))


def registered(rules: Sequence[Check]) -> tuple[Heading, ...]:
    of_code: dict[str, list[Check]] = {}
    for each in rules:
        of_code.setdefault(each.code, []).append(each)
    return tuple(
        _heading(found[0].area, found[0].page, found, [code for each in found for code in each.was])
        for found in of_code.values()
    )


def retired(codes: Iterable[str]) -> Iterator[Heading]:
    """Describe the codes that belong to no check any more, exactly as given."""
    for code in map(str.upper, codes):
        if now := RETIRED.get(code):
            page = f"{code} is no check any more\n\n{now[:1].upper()}{now[1:]}."
            yield Heading(code, "retired", "environment", "info", page)


def _own() -> Iterator[Heading]:
    """Read our own checks: each is a file, or a folder whose first file has its page."""
    from fp8doctor import checks

    for folder in checks.__path__:
        for path in Path(folder).glob("*/[!_]*"):
            files = [path] if path.suffix == ".py" else sorted(path.glob("*.py"))
            if text := "".join(each.read_text("utf-8") for each in files):
                rules = [SimpleNamespace(**each.groupdict()) for each in HEAD.finditer(text)]
                former = re.findall(r'"(\w+)"', " ".join(FORMERLY.findall(text)))
                yield _heading(path.parent.name, inspect.cleandoc(text.split('"""')[1]), rules, former)


def _heading(area: str, page: str, rules: Sequence[Any], former: Sequence[str]) -> Heading:
    """Describe the rules of one code."""
    first, *others = rules
    severity = max((each.severity for each in rules), key=SEVERITIES.index)
    return Heading(first.code, first.name, area, severity, page, (*(each.name for each in others), *former))
