"""What is printed: the only place that writes to stdout or stderr, and that knows what the terminal can
show."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click


def wants_colour() -> bool:
    """Whether stdout takes colours: NO_COLOR and FORCE_COLOR first, then whether it is a terminal that is not
    dumb."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")


def wants_ascii() -> bool:
    """Whether the locale cannot show the glyphs. Python opens stdout in UTF-8 even in the C locale, so that
    is asked for by name."""
    if (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX"):
        return True
    try:
        "✗✓–−·".encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return True
    return False


def show(text: str | bytes) -> None:
    """Print on stdout. A reader who has left early, such as ``head``, is no mistake."""
    try:
        if isinstance(text, str):
            text = text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
        click.echo(text, nl=False, color=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_page(text: str) -> None:
    """Print lines of our own."""
    from fp8doctor.render.terminal import to_ascii

    show((to_ascii(text) if wants_ascii() else text) + "\n")


def show_json(data: Any) -> None:
    from fp8doctor.facts.record import encode

    show(encode(data))


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that says on stderr what is being done: one line that changes on a terminal, a line each
    elsewhere."""
    if quiet:
        yield lambda text: None
    elif not sys.stderr.isatty():
        yield complain
    else:
        from threading import Event, Thread

        from tqdm import tqdm

        with tqdm(bar_format="{desc} {elapsed}", leave=False, file=sys.stderr) as bar:
            ended = Event()

            def tick() -> None:
                while not ended.wait(0.5):
                    bar.refresh()

            thread = Thread(target=tick, daemon=True)
            thread.start()
            try:
                yield bar.set_description_str
            finally:
                ended.set()
                thread.join()


def complain(sentence: str, detail: str = "") -> None:
    """Say something on stderr, and below it the user's own frames where there are some."""
    from fp8doctor.render.terminal import harmless, harmless_lines

    click.echo(f"fp8doctor: {harmless(sentence)}", err=True)
    if detail:
        click.echo("\n".join(harmless_lines(detail)), err=True)


def complain_of_ourselves(error: Exception, *, verbose: bool) -> None:
    complain(
        f"internal error, {type(error).__name__}: {error}. This is a mistake of fp8doctor, not yours: "
        "please report it with what the same "
        "command says with -v."
    )
    if verbose:
        import traceback

        click.echo("".join(traceback.format_exception(error)), err=True)
