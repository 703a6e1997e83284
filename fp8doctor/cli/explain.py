"""The command ``explain``: a check by code, name or a word in it, or an error's text."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.cli.console import columns, show_json, show_page
from fp8doctor.cli.delivery import OK
from fp8doctor.cli.options import list_options
from fp8doctor.errors import UserError
from fp8doctor.headings import fired

if TYPE_CHECKING:
    from fp8doctor.headings import Heading
    from fp8doctor.known_errors import KnownError

MOST_WORDS = 3
"""Words of a search; a longer text is an error message."""

SHORTEST_WORD = 3
"""Characters of a word in a search."""

LONGEST_CODE = 40
"""Characters of a search word; a longer one is neither searched for nor repeated in an answer."""

LONGEST_MESSAGE, LONGEST_LINE = 300, 2000
"""Characters of a text without, and with, a line that names an exception, in which names are looked up."""

SHORTEST_NAME = 4
"""Characters of a name in a message; GiB and TE are in too many messages."""

MOST_PAGES = 5
"""Pages to show for a name."""

PREFIX = r"[A-Z]{3,5}\d{0,3}"
"""The beginning of a code. In small letters it is a search word."""

EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Warning)\b.*", re.MULTILINE)
"""The line that names an exception."""

FRAME = re.compile(r'^.{0,200}\bFile "([^"\n]{1,400})", line \d+', re.MULTILINE)
"""A frame of a traceback."""

NAME = re.compile(r"[^\W_]_[^\W_]|[a-z][A-Z]")
"""Part of a name in code that ordinary words do not have."""

NOT_KNOWN = "fp8doctor does not know this exact message."

ENDS_OTHERWISE = "fp8doctor does not know the last exception in this text. It knows these messages before it:"


@click.command()
@click.argument("asked", nargs=-1, metavar="CODE...|WORDS|ERROR|-")
@list_options
def explain(asked: tuple[str, ...], format: str, checks: tuple[Path, ...]) -> int:
    """Explain checks (by code, prefix, name or a word in them: CMP001 SHP LoRA) or an error message.

    With -, or without an argument, read a log from stdin: fp8doctor explain < train.log
    """
    from fp8doctor import known_errors
    from fp8doctor.headings import headings, retired

    if not asked and sys.stdin.isatty():
        raise UserError("name a code or an error message, or give a log: fp8doctor explain < train.log")
    text = _from_stdin() if asked in ((), ("-",)) else " ".join(asked)
    catalogue = headings(checks)
    if named := named_by(asked, (*catalogue, *retired(asked))):
        every = [{**summary(check), "page": check.page, "corpus": fired(check.code)} for check in named]
        heads = [f"{each.code} {each.name} · {each.area} · {each.severity}\n\n{each.page}" for each in named]
        _show(
            format,
            every[0] if len(named) == 1 else {"checks": every},
            f"\n\n{'-' * columns()}\n\n".join(heads),
        )
    elif errors := known_errors.recognise_all(text):
        last_is_known = known_errors.fatal_is_known(text)
        data = {} if last_is_known else {"last_exception_known": False}
        _show_errors(format, errors, catalogue, "" if last_is_known else ENDS_OTHERWISE, data)
    elif found := speaking_of(text, catalogue):
        _show(format, {"checks": list(map(summary, found))}, _headings(found))
    elif related := known_errors_like(_message(text)):
        head = f"{NOT_KNOWN} These messages share a name with it:"
        _show_errors(format, related, catalogue, head, {"related": True})
    elif pages := pages_like(_message(text), catalogue)[:MOST_PAGES]:
        head = f"{NOT_KNOWN} These pages share a name with it:\n\n{_headings(pages)}"
        _show(format, {"checks": list(map(summary, pages)), "related": True}, head)
    else:
        raise UserError(_not_known(text, catalogue))
    return OK


def named_by(asked: Sequence[str], catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the checks by code, name or prefix; none unless every word is one."""
    found: dict[str, Heading] = {}
    for word in ",".join(asked).replace(" ", ",").split(","):
        checks = [
            each
            for each in catalogue
            if word.lower() in (each.code.lower(), each.name, *map(str.lower, each.also))
            or (re.fullmatch(PREFIX, word) and any(key.startswith(word) for key in (each.code, *each.also)))
        ]
        if word and not checks:
            return []
        found |= {check.code: check for check in checks}
    return list(found.values())


def speaking_of(text: str, catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the checks with one of a few words in title or name, or all in the page."""
    words = [word for word in text.lower().split() if len(word) >= SHORTEST_WORD]
    if not 0 < len(words) <= MOST_WORDS or max(map(len, words)) > LONGEST_CODE or _is_of_an_error(text):
        return []
    phrase = " ".join(text.lower().split())

    def rank(check: Heading) -> tuple[bool, int, int]:
        heading, page = f"{check.area} {check.name} {check.title}".lower(), check.page.lower()
        return (
            len(words) > 1 and phrase in " ".join(page.split()),
            sum(_count(word, heading) > 0 for word in words),
            min(_count(word, page) for word in words),
        )

    ranks = {check.code: rank(check) for check in catalogue}
    found = (check for check in catalogue if any(ranks[check.code]))
    return sorted(found, key=lambda each: ranks[each.code], reverse=True)


def summary(check: Heading) -> dict[str, Any]:
    """Describe a check as ``list`` and ``explain`` write it in JSON."""
    return {name: getattr(check, name) for name in ("code", "name", "area", "severity", "title")}


def _is_of_an_error(text: str) -> bool:
    return re.search(r":|error\b|exception\b|Error|Exception", text) is not None


def _message(text: str) -> str:
    """Return the last exception in a text; a short text itself, otherwise nothing."""
    if raised := EXCEPTION.findall(text):
        return str(raised[-1])[:LONGEST_LINE]
    return text if len(text) <= LONGEST_MESSAGE else ""


def known_errors_like(message: str) -> list[KnownError]:
    """Find the known errors that share a name of code with a message."""
    from fp8doctor.known_errors import known_errors

    wanted = _names(message)
    return [each.filled({}) for each in known_errors() if any(_count(name, each.says) for name in wanted)]


def pages_like(message: str, catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the pages that share names of code with a message, the most often first."""
    counts = {check.code: sum(_count(name, check.page) for name in _names(message)) for check in catalogue}
    return sorted((each for each in catalogue if counts[each.code]), key=lambda each: -counts[each.code])


def _names(message: str) -> list[str]:
    """Find the names of code in a message, except its own exception."""
    words = (part for word in re.findall(r"[A-Za-z_][\w.]*", message) for part in word.split("."))
    kept = (each for each in words if len(each) >= SHORTEST_NAME and NAME.search(each))
    return list(dict.fromkeys(each for each in kept if not re.search(r"(?:Error|Exception|Warning)$", each)))


def _count(name: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", text))


def _from_stdin() -> str:
    """Read stdin and keep its end, where an error message is."""
    from fp8doctor.known_errors import LONGEST

    return sys.stdin.buffer.read()[-LONGEST:].decode("utf-8", "replace")


def _show(format: str, data: dict[str, Any], page: str) -> None:
    """Print the data, or the page in the terminal's width."""
    if format == "json":
        show_json(data)
        return
    from fp8doctor.render.terminal import reflow

    show_page("\n".join(reflow(page, columns())).rstrip())


def _headings(found: Sequence[Heading]) -> str:
    """List checks, and the command that shows the first page."""
    lines = "\n\n".join(f"{each.code} {each.name}: {each.title}" for each in found)
    return f"{lines}\n\nMore: fp8doctor explain {found[0].code}"


def _show_errors(
    format: str, errors: Sequence[KnownError], catalogue: Sequence[Heading], head: str, data: dict[str, Any]
) -> None:
    """Show known errors: those that only share a name come without advice, further warnings as one line."""
    from fp8doctor.facts.scrub import scrub

    errors = [each._replace(cause=scrub(each.cause), lines=scrub(each.lines)) for each in errors]
    related = "related" in data
    full = [each for each in errors if related or each.kind == errors[0].kind]
    pages = [head, *(_error_page(error, catalogue, advice=not related) for error in full)]
    if rest := [each.says for each in errors if each not in full]:
        pages.append(f"Also in this text: {' · '.join(rest)}")
    _show(format, {"errors": [each._asdict() for each in errors], **data}, "\n\n".join(filter(None, pages)))


def _error_page(error: KnownError, catalogue: Sequence[Heading], *, advice: bool) -> str:
    """Describe an error in the table's words; only names that its pattern asks for are repeated."""
    finders = [f"{check.code} {check.name}" for check in catalogue if check.code in error.codes]
    found = f"Found by: {', '.join(finders)}. fp8doctor explain {error.codes[0]}" if finders else ""
    told = [error.says, f"Cause. {error.cause}"]
    if advice:
        lines = "\n".join(f"    {line}" for line in error.lines.split("\n"))
        told += ["What to do.", lines, f"Versions: {error.versions}.", found, f"Source: {error.source}."]
    else:
        told.append(found)
    return "\n\n".join(filter(None, told))


def _not_known(text: str, catalogue: Sequence[Heading]) -> str:
    """Say that nothing was found, without repeating text that may hold a secret."""
    from difflib import get_close_matches

    from fp8doctor.facts.scrub import scrub
    from fp8doctor.known_errors import known_errors

    word = text.strip()
    if not word:
        return "nothing to explain. 'fp8doctor list' shows the checks"
    if len(word) <= LONGEST_CODE and len(word.split()) == 1:
        near = get_close_matches(scrub(word).upper(), [check.code for check in catalogue])
        alike = f" (did you mean {', '.join(near)}?)" if near else ""
        return f"no check or page has {scrub(word)!r}{alike}. 'fp8doctor list' shows the checks"
    frames = [found.group(1) for found in FRAME.finditer(text)]
    inside = re.search(r"-packages[/\\](([A-Za-z]\w*)[/\\][\w/\\.-]+)$", frames[-1]) if frames else None
    then = "To examine a job, use 'fp8doctor model.py' or 'fp8doctor run train.py'"
    if inside:
        then = (
            f"{inside[2]} raised its last exception ({inside[1]}). Search for the message in the issues of "
            f"{inside[2]}; 'pip show {inside[2]}' tells its version"
        )
    return f"this text has none of the {len(known_errors())} messages that fp8doctor knows. {then}"
