"""The command that explains: a check by its code or name, an error by its text, a word, a page by what is in
it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.cli import completion
from fp8doctor.cli.console import columns, show_json, show_page
from fp8doctor.cli.delivery import OK
from fp8doctor.cli.options import list_options
from fp8doctor.cli.project import ProjectCommand
from fp8doctor.corpus import fired
from fp8doctor.errors import UserError

if TYPE_CHECKING:
    from fp8doctor.glossary import Word
    from fp8doctor.headings import Heading
    from fp8doctor.known_errors import KnownError

MOST_WORDS = 3
"""More words than these are an error's text, not what somebody looks for."""

SHORTEST_WORD = 3
"""Characters of a word that is looked for."""

PREFIX = r"[A-Z]{3,5}\d{0,3}"
"""How a code begins; in small letters it is a word that is looked for."""

LONGEST_CODE = 40
"""Characters; what is longer is neither looked for nor repeated in an answer."""


@click.command(cls=ProjectCommand)
@click.argument(
    "asked",
    nargs=-1,
    required=True,
    metavar="CODE...|WORDS|ERROR|-",
    shell_complete=completion.codes_and_words,
)
@list_options
def explain(asked: tuple[str, ...], format: str, checks: tuple[Path, ...]) -> int:
    """Explain a check (by code, prefix or name: CMP001 SHP), a term (amax, load_in_fp8) or an error message.

    With -, read a traceback from stdin.
    """
    from fp8doctor.headings import headings

    text = _from_stdin() if asked == ("-",) else " ".join(asked)
    catalogue = headings(checks)
    named = named_by(asked, catalogue)
    if named:
        data = [{**summary(check), "page": check.page, "corpus": fired(check.code)} for check in named]
        page = f"\n\n{'-' * columns()}\n\n".join(map(_page, named))
        _show(format, data[0] if len(named) == 1 else {"checks": data}, page)
    elif word := _word(text):
        _show_word(format, *word, catalogue)
    elif errors := _errors(text):
        _show_errors(format, errors, catalogue)
    elif found := speaking_of(text, catalogue):
        _show(format, {"checks": list(map(summary, found))}, "\n".join(_headings(found)))
    elif word := _word_within(text):
        _show_word(format, *word, catalogue)
    elif not _show_related(format, text, catalogue):
        raise UserError(_not_known(text, catalogue))
    return OK


def _show_related(format: str, text: str, catalogue: Sequence[Heading]) -> bool:
    """Show what the words of a text lead to that holds no known message; whether they do."""
    from fp8doctor.cli import related

    said = related.message(text)
    not_known = "fp8doctor does not know exactly this message."
    if errors := related.errors_near(said):
        _show_errors(format, errors, catalogue, f"{not_known} It knows these, which share a name with it:")
    elif word := related.word_in(said):
        _show_word(format, *word, catalogue, f"{not_known} It explains a word in it:")
    elif found := related.pages_near(said, catalogue):
        head = (*_wrapped(f"{not_known} These pages share a name with it:"), "", *_headings(found))
        _show(format, {"checks": list(map(summary, found)), "related": True}, "\n".join(head))
    else:
        return False
    return True


def named_by(asked: Sequence[str], catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the checks of codes, names, and how codes in capitals begin; none unless every word is one."""
    found: dict[str, Heading] = {}
    for word in ",".join(asked).replace(" ", ",").split(","):
        checks = [
            each
            for each in catalogue
            if word.lower() in (each.code.lower(), each.name)
            or (re.fullmatch(PREFIX, word) and each.code.startswith(word))
        ]
        if word and not checks:
            return []
        found |= {check.code: check for check in checks}
    return list(found.values())


def _word(text: str) -> tuple[str, Word] | None:
    from fp8doctor import glossary

    return glossary.look_up(text)


def _word_within(text: str) -> tuple[str, Word] | None:
    """Find a word in a phrase; an error's text is none."""
    from fp8doctor import glossary

    return None if _is_of_an_error(text) else glossary.within(text)


def _errors(text: str) -> tuple[KnownError, ...]:
    from fp8doctor.known_errors import recognise

    return recognise(text)


def _page(check: Heading) -> str:
    from fp8doctor.render.terminal import reflow

    head = f"{check.code} {check.name} · {check.area} · {check.severity}"
    return "\n".join(reflow(f"{head}\n\n{check.page}", columns())).rstrip()


def _from_stdin() -> str:
    """Read to the end, of which alone something is looked for."""
    from fp8doctor.known_errors import LONGEST

    return sys.stdin.buffer.read()[-LONGEST:].decode("utf-8", "replace")


def _show(format: str, data: dict[str, Any], page: str) -> None:
    if format == "json":
        show_json(data)
    else:
        show_page(page)


def _show_errors(
    format: str, errors: Sequence[KnownError], catalogue: Sequence[Heading], head: str = ""
) -> None:
    """Show what is known of errors; with a head they are only related to what was asked."""
    told = {"errors": [error._asdict() for error in errors], **({"related": True} if head else {})}
    pages = (_error_page(error, catalogue, whole=not head) for error in errors)
    _show(format, told, "\n\n".join((*(["\n".join(_wrapped(head))] if head else []), *pages)))


def _show_word(format: str, name: str, word: Word, catalogue: Sequence[Heading], head: str = "") -> None:
    """Show what a word means, and the checks whose pages lead on; with a head it is only related to what was
    asked."""
    by_code = {check.code: check for check in catalogue}
    found = [by_code[code] for code in word.codes if code in by_code]
    also = f" ({word.names[0]})" if name != word.names[0] else ""
    told: dict[str, Any] = {"word": name, "says": word.says, "checks": list(map(summary, found))}
    if head:
        told["related"] = True
    page = (
        *([*_wrapped(head), ""] if head else []),
        *_wrapped(f"{name}{also}: {word.says}"),
        *([""] if found else []),
        *_headings(found),
    )
    _show(format, told, "\n".join(page))


def _headings(found: Sequence[Heading]) -> Iterator[str]:
    """Write a line for each check, and how to read the first page."""
    for each in found:
        yield from _wrapped(f"{each.code} {each.name}: {each.title}", hanging=2)
    if found:
        yield ""
        yield f"More: fp8doctor explain {found[0].code}"


def _error_page(error: KnownError, catalogue: Sequence[Heading], *, whole: bool = True) -> str:
    """Write what is known of an error, in the words of the table: nothing of the user's text is repeated.
    Without ``whole`` no advice is given."""
    finders = [f"{check.code} {check.name}" for check in catalogue if check.code in error.codes]
    found = f"Found by: {', '.join(finders)}. fp8doctor explain {error.codes[0]}" if finders else ""
    if not whole:
        return "\n".join((*_wrapped(error.says), *_wrapped(f"Cause. {error.cause}"), *_wrapped(found)))
    from fp8doctor.render.terminal import in_width

    lines = in_width([f"    {line}" for line in error.lines.split("\n")], columns())
    return "\n".join(
        (
            *_wrapped(error.says),
            "",
            *_wrapped(f"Cause. {error.cause}"),
            "",
            "What to do.",
            "",
            *lines,
            "",
            *_wrapped(f"Versions: {error.versions}."),
            *_wrapped(found),
            *_wrapped(f"Source: {error.source}."),
        )
    )


def _wrapped(text: str, hanging: int = 0) -> Iterator[str]:
    from fp8doctor.render.terminal import filled

    yield from filled(" ".join(text.split()), columns(), hanging)


def speaking_of(text: str, catalogue: Sequence[Heading]) -> list[Heading]:
    """Find the checks of a few words: one is in the title or the name, or all stand together in the page,
    or are in it where no word of the glossary is among them. The page that has them together comes first."""
    words = [word for word in text.lower().split() if len(word) >= SHORTEST_WORD]
    if not 0 < len(words) <= MOST_WORDS or max(map(len, words)) > LONGEST_CODE:
        return []
    if _is_of_an_error(text):
        return []
    patterns = [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)") for word in words]

    phrase = " ".join(text.lower().split())

    def rank(check: Heading) -> tuple[bool, int, int]:
        heading = f"{check.area} {check.name} {check.title}".lower()
        page = check.page.lower()
        return (
            len(words) > 1 and phrase in " ".join(page.split()),
            sum(pattern.search(heading) is not None for pattern in patterns),
            min(len(pattern.findall(page)) for pattern in patterns),
        )

    ranks = {check.code: rank(check) for check in catalogue}
    named = any(any(each[:2]) for each in ranks.values()) or _word_within(text) is None
    return sorted(
        (check for check in catalogue if named and any(ranks[check.code])),
        key=lambda each: ranks[each.code],
        reverse=True,
    )


def _is_of_an_error(text: str) -> bool:
    return re.search(r":|Error|Exception", text) is not None


def _not_known(text: str, catalogue: Sequence[Heading]) -> str:
    """Say that nothing is known, without repeating what may be a secret."""
    from fp8doctor.facts.scrub import scrub
    from fp8doctor.known_errors import KNOWN_ERRORS

    word = text.strip()
    if not word:
        return "nothing to explain was given; 'fp8doctor list' shows what is checked"
    if len(word) <= LONGEST_CODE and len(word.split()) == 1:
        word = scrub(word)
        return (
            f"no check has the code {word!r}{alike(word, catalogue)}, and no page speaks of it; "
            "'fp8doctor list' shows all checks"
        )
    if len(word.split()) <= MOST_WORDS and len(word) <= LONGEST_CODE and not _is_of_an_error(word):
        return (
            "neither a page nor the glossary has these words; 'fp8doctor list' shows what is checked, and "
            "'fp8doctor model.py' or 'fp8doctor run train.py' looks at the job itself"
        )
    return (
        f"this text holds none of the {len(KNOWN_ERRORS)} messages that are known, so nothing can be said of "
        "it; 'fp8doctor list' shows what is checked, and 'fp8doctor model.py' or 'fp8doctor run train.py' "
        "looks at the job itself"
    )


def summary(check: Heading) -> dict[str, Any]:
    """A check as ``list`` and ``explain`` write it in JSON."""
    return {
        "code": check.code,
        "name": check.name,
        "area": check.area,
        "severity": check.severity,
        "title": check.title,
    }


def alike(code: str, catalogue: Sequence[Heading]) -> str:
    """Name the codes and words that are spelled nearly so."""
    from difflib import get_close_matches

    from fp8doctor import glossary

    near = [*get_close_matches(code.upper(), [check.code for check in catalogue]), *glossary.alike(code)]
    return f" (there is {', '.join(near)})" if near else ""
