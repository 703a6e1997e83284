"""Output to stdout and stderr, and what the terminal supports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.errors import UserError

if TYPE_CHECKING:
    from fp8doctor.stages import Doing
    from fp8doctor.worker.parent import Printed

WIDEST = 100
"""Columns of output to a pipe or a file."""

WIDEST_SCREEN = 120
"""Columns of output on a wide terminal."""

OK, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: nothing grave, findings at or above ``--fail-on``, no complete report or unlike jobs,
Ctrl-C."""


def stand_in_for_closed_streams() -> None:
    """Open the null device for closed standard streams, lest files get their numbers; stdout read-only."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def columns() -> int:
    """Find the width of a page on stdout: from COLUMNS, otherwise from the terminal."""
    try:  # shutil's function loads three libraries of compression first
        wide = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        wide = WIDEST
    return min(WIDEST_SCREEN, wide if wide > 0 else WIDEST)


def wants_colour() -> bool:
    """Return whether to color stdout: by NO_COLOR, FORCE_COLOR, then the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def wants_ascii() -> bool:
    """Return whether the locale lacks the glyphs; Python opens stdout in UTF-8 anyway."""
    if (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX"):
        return True
    try:
        "✗✓–−·█▓▒░╱╭".encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return True
    return False


def show(text: str | bytes) -> None:
    """Print on stdout, unless its reader left early (``head``). A full disk raises `UserError`."""
    try:
        if isinstance(text, str):
            text = text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
        click.echo(text, nl=False, color=True)
    except BrokenPipeError:
        _discard(1)
    except OSError as error:
        raise stdout_failed(error) from None


def stdout_failed(error: OSError) -> UserError:
    """Give up stdout and return the reason."""
    _discard(1)
    return UserError(f"cannot write to stdout: {error.strerror}")


def _discard(stream: int) -> None:
    """Redirect a standard stream, with its buffered text, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def show_page(text: str) -> None:
    from fp8doctor.render.terminal import to_ascii

    show((to_ascii(text) if wants_ascii() else text) + "\n")


def show_json(data: Any) -> None:
    from fp8doctor.facts.record import encode

    show(encode(data))


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[Doing], None]]:
    """Yield a progress callback: one line on a terminal, else a line per stage."""
    if quiet:
        yield lambda doing: None
    elif not sys.stderr.isatty():
        from fp8doctor.stages import Course

        course = Course()
        yield lambda doing: complain(course.line()) if course.take(doing) else None
    else:
        from dataclasses import replace

        from fp8doctor.render.terminal import printable_line
        from fp8doctor.stages import progress_line

        with progress_line(ascii=wants_ascii()) as tell:
            yield lambda doing: tell(replace(doing, text=printable_line(doing.text)))


def complain_of_printed(printed: Printed, *, whole: bool) -> None:
    """Show workers' stderr: all of it after a failure, otherwise each line once."""
    if counted := printed.counted():
        each, kept = "" if whole else ", each line once", " (its last MiB)" if printed.cut else ""
        lines = printed.lines() if whole else counted
        complain(f"libraries and your file printed on stderr{each}{kept}:", "\n".join(lines))


def complain(sentence: str, detail: str = "") -> None:
    """Print a message on stderr, and below it the user's own frames if there are some."""
    from fp8doctor.render.terminal import printable_line, printable_lines

    _say(f"fp8doctor: {printable_line(sentence)}")
    if detail:
        _say("\n".join(printable_lines(detail)))


def complain_of_known(text: str) -> None:
    from fp8doctor.known_errors import in_a_sentence

    if known := in_a_sentence(text):
        _say(known)


def _say(text: str) -> None:
    """Print on stderr; if that fails, print nowhere from now on."""
    try:
        click.echo(text, err=True)
    except OSError:
        _discard(2)
