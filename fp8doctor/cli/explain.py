"""The commands ``explain`` and ``list``, and the head of every check: code, name, area, severity and page.

Heads are read from the text of the files, because importing all checks is too slow for a list; those of other
folders come from the registry.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from glob import glob
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fp8doctor.areas import AREAS, RETIRED, SEVERITIES
from fp8doctor.cli.console import OK, columns, show_json, show_page
from fp8doctor.cli.options import list_options
from fp8doctor.errors import UserError
from fp8doctor.wording import did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

    from fp8doctor.known_errors import KnownError

SHORTEST = 3
"""Characters of words that are looked for."""

LONGEST_WORD = 40
"""Characters of words that are looked for in pages, or repeated in an answer."""

PREFIX = r"[A-Z]{3,5}\d{0,3}"
"""The beginning of a code. In small letters it is a search word."""

ENDS_OTHERWISE = "fp8doctor does not know the last exception in this text. It knows these messages before it:"


@click.command(params=[*list_options])
@click.argument("asked", nargs=-1, metavar="CODE...|WORDS|ERROR|-")
def explain(asked: tuple[str, ...], format: str, checks: tuple[Path, ...]) -> int:
    """Explain checks (by code, prefix, name or a word in them: CMP001 SHP LoRA) or an error message.

    With -, or without an argument, read a log from stdin: fp8doctor explain < train.log
    """
    if not asked and sys.stdin.isatty():
        raise UserError("name a code or an error message, or give a log: fp8doctor explain < train.log")
    text = " ".join(asked)
    if asked in ((), ("-",)):
        from fp8doctor.known_errors import LONGEST

        text = sys.stdin.buffer.read()[-LONGEST:].decode("utf-8", "replace")
    catalogue = headings(checks)
    data: dict[str, Any]
    if named := named_by(asked, (*catalogue, *retired(asked))):
        every = [{**summary(check), "page": check.page} for check in named]
        heads = [f"{each.code} {each.name} · {each.area} · {each.severity}\n\n{each.page}" for each in named]
        data = every[0] if len(named) == 1 else {"checks": every}
        page = f"\n\n{'-' * columns()}\n\n".join(heads)
    elif recognised := _of_errors(text, catalogue):
        data, page = recognised
    elif found := [each for each in catalogue if len(text) <= LONGEST_WORD and _has(each.page, text)]:
        data = {"checks": list(map(summary, found))}
        lines = [f"{each.code} {each.name}: {each.title}" for each in found]
        page = "\n\n".join((*lines, f"More: fp8doctor explain {found[0].code}"))
    else:
        raise UserError(_not_known(text, catalogue))
    if format == "json":
        show_json(data)
    else:
        from fp8doctor.render.terminal import reflow

        show_page("\n".join(reflow(page, columns())).rstrip())
    return OK


def named_by(asked: Sequence[str], catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the checks by code, prefix or a word of name or title; none unless every word finds some."""
    found: dict[str, Heading] = {}
    for word in ",".join(asked).replace(" ", ",").split(","):
        checks = [each for each in catalogue if _is_named(each, word)]
        if word and not checks:
            return []
        found |= {check.code: check for check in checks}
    return list(found.values())


def _is_named(check: Heading, word: str) -> bool:
    keys = (check.code, check.name, *check.also)
    of_prefix = re.fullmatch(PREFIX, word) and any(key.startswith(word) for key in keys)
    if of_prefix or word.lower() in map(str.lower, keys):
        return True
    return _has(" ".join((check.area, *keys, check.title)), word)


def _has(text: str, words: str) -> bool:
    """Return whether a text has these words in a row, in any case."""
    row = " ".join(words.split())
    found = re.search(rf"(?<!\w){re.escape(row)}(?!\w)", " ".join(text.split()), re.IGNORECASE)
    return len(row) >= SHORTEST and found is not None


def summary(check: Heading) -> dict[str, Any]:
    """Describe a check as ``list`` and ``explain`` write it in JSON."""
    return {name: getattr(check, name) for name in ("code", "name", "area", "severity", "title")}


def _of_errors(text: str, catalogue: Sequence[Heading]) -> tuple[dict[str, Any], str] | None:
    """Describe the known errors in a text as data and as a page, which has further warnings in one line."""
    from fp8doctor import known_errors
    from fp8doctor.facts.scrub import scrub

    found = known_errors.recognise_all(text)
    if not found:
        return None
    ends_otherwise = not known_errors.fatal_is_known(text)
    errors = [each._replace(cause=scrub(each.cause), lines=scrub(each.lines)) for each in found]
    full = [each for each in errors if each.kind == errors[0].kind]
    rest = [each.says for each in errors if each not in full]
    pages = [ENDS_OTHERWISE] * ends_otherwise + [_error_page(error, catalogue) for error in full]
    pages += [f"Also in this text: {' · '.join(rest)}"] if rest else []
    data: dict[str, Any] = {"errors": [each._asdict() for each in errors]}
    return data | ({"last_exception_known": False} if ends_otherwise else {}), "\n\n".join(pages)


def _error_page(error: KnownError, catalogue: Sequence[Heading]) -> str:
    """Describe an error in the table's words; only names that its pattern asks for are repeated."""
    finders = [f"{check.code} {check.name}" for check in catalogue if check.code in error.codes]
    found = f"Found by: {', '.join(finders)}. fp8doctor explain {error.codes[0]}" if finders else ""
    lines = "\n".join(f"    {line}" for line in error.lines.split("\n"))
    told = (error.says, f"Cause. {error.cause}", "What to do.", lines, f"Versions: {error.versions}.", found)
    return "\n\n".join(filter(None, (*told, f"Source: {error.source}.")))


def _not_known(text: str, catalogue: Sequence[Heading]) -> str:
    """Say that nothing was found, without repeating text that may hold a secret."""
    from fp8doctor.facts.scrub import scrub
    from fp8doctor.known_errors import known_errors

    word = text.strip()
    if not word:
        return "nothing to explain. 'fp8doctor list' shows the checks"
    if len(word) <= LONGEST_WORD and len(word.split()) == 1:
        meant = did_you_mean(scrub(word).upper(), [check.code for check in catalogue])
        return f"no check or page has {scrub(word)!r}; 'fp8doctor list' shows the checks{meant}"
    return (
        f"this text has none of the {len(known_errors())} messages that fp8doctor knows. To examine a job, "
        "use 'fp8doctor model.py' or 'fp8doctor run train.py'"
    )


@click.command(params=[*list_options])
def list_(format: str, checks: tuple[Path, ...]) -> int:
    """List all checks."""
    catalogue = headings(checks)
    if format == "json":
        show_json([summary(check) for check in catalogue])
        return OK
    rows = [(check.code, check.severity, check.area, check.name) for check in catalogue]
    widest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, check in zip(rows, catalogue, strict=True):
        show_page("  ".join((*map(str.ljust, row, widest), check.title)))
    return OK


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
