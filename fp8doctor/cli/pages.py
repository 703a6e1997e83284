"""Options and delivery of the commands that print a page and no report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from fp8doctor.cli.console import WIDEST, columns, complain, show, wants_ascii, wants_colour
from fp8doctor.cli.delivery import format_of, keep_apart, writable
from fp8doctor.cli.options import FILE, with_options
from fp8doctor.files import write_text

if TYPE_CHECKING:
    from fp8doctor.render.sheet import Sheet

PAGE_FORMATS = ("text", "json", "markdown", "html")

page_options = with_options(
    click.option(
        "--format",
        type=click.Choice(PAGE_FORMATS),
        help="Format of the output. Default: from the suffix of -o (.txt, .json, .md, .html), else text.",
    ),
    click.option("-o", "--output", metavar="FILE", type=FILE, help="Write to a file instead of stdout."),
)


class PageOptions(NamedTuple):
    """What the options ask for, checked before anything is read."""

    format: str
    output: Path | None

    @classmethod
    def checked(cls, format: str | None, output: Path | None, sources: Sequence[Path]) -> PageOptions:
        """Check them. Raises `UserError` or a usage error for what cannot be done."""
        if output is not None:
            writable(output)
            for source in sources:
                keep_apart([("-o", output)], source)
        found = format_of(format, output, PAGE_FORMATS)
        return cls(found, output)


def deliver_page(wanted: PageOptions, json: Callable[[], str], page: Callable[[], Sheet]) -> None:
    """Write the page to where it was asked for."""
    if wanted.output:
        write_text(wanted.output, _rendered(wanted, json, page, width=WIDEST))
        complain(f"wrote {wanted.output}")
        return
    width = columns()
    text = _rendered(wanted, json, page, width=width, colour=wants_colour(), ascii=wants_ascii())
    show(text.encode() if wanted.format == "json" else text)


def _rendered(
    wanted: PageOptions,
    json: Callable[[], str],
    page: Callable[[], Sheet],
    *,
    width: int,
    colour: bool = False,
    ascii: bool = False,
) -> str:
    from fp8doctor.render.sheet import as_html, as_markdown, as_text

    if wanted.format == "json":
        return json()
    if wanted.format == "markdown":
        return as_markdown(page())
    if wanted.format == "html":
        return as_html(page())
    return as_text(page(), width=width, colour=colour, ascii=ascii)
