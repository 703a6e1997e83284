"""The head of every check: code, name, area, severity and page.

Read from the text of the files, because importing all of them is too slow for a list; those of other folders
come from the registry.
"""

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from glob import glob
from types import SimpleNamespace
from typing import Any, NamedTuple

from fp8doctor.areas import AREAS, RETIRED, SEVERITIES

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


def headings(folders: Sequence[Any] = ()) -> tuple[Heading, ...]:
    """List the checks as `fp8doctor.registry.discover` finds them. Raises the same `UserError`."""
    if folders:
        from fp8doctor.registry import discover

        return of_rules(discover(folders))
    return of_rules(_own())


def of_rules(rules: Iterable[Any]) -> tuple[Heading, ...]:
    """Describe each code; its rules are `fp8doctor.registry.Check`, or what stands in their files."""
    of_code: dict[str, list[Any]] = {}
    for each in rules:
        of_code.setdefault(each.code, []).append(each)
    found = []
    for code, (first, *others) in of_code.items():
        severity = max((each.severity for each in (first, *others)), key=SEVERITIES.index)
        former = (each for rule in (first, *others) for each in rule.was)
        also = tuple(dict.fromkeys((*(each.name for each in others), *former)))
        found.append(Heading(code, first.name, first.area, severity, first.page, also))
    return tuple(sorted(found, key=lambda each: (AREAS.index(each.area), each.code)))


def _own() -> Iterator[SimpleNamespace]:
    """Read our own rules: a check is a file, or a folder whose first file has its page."""
    from fp8doctor import checks

    for folder in checks.__path__:
        for path in glob(os.path.join(folder, "*", "[!_]*")):
            text = ""
            for file in [path] if path.endswith(".py") else sorted(glob(os.path.join(path, "*.py"))):
                with open(file, encoding="utf-8") as opened:
                    text += opened.read()
            if text:
                page = inspect.cleandoc(text.split('"""', 2)[1])
                was = re.findall(r'"(\w+)"', " ".join(FORMERLY.findall(text)))
                area = os.path.basename(os.path.dirname(path))
                for each in HEAD.finditer(text):
                    yield SimpleNamespace(**each.groupdict(), area=area, page=page, was=was)


def retired(codes: Iterable[str]) -> Iterator[Heading]:
    """Describe the codes that belong to no check any more, exactly as given."""
    for code in map(str.upper, codes):
        if now := RETIRED.get(code):
            page = f"{code} is no check any more\n\n{now[:1].upper()}{now[1:]}."
            yield Heading(code, "retired", "environment", "info", page)
