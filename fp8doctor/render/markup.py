"""A page as Markdown, for issues, pull requests and notebooks, and as HTML."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8doctor.answer.items import Mark
from fp8doctor.answer.sentences import Box
from fp8doctor.render.page import (
    FAMILIES,
    LOOKS,
    TONES,
    Bars,
    Code,
    Heatmap,
    Marked,
    Marks,
    Next,
    Page,
    Part,
    Quiet,
    Strong,
    Table,
)
from fp8doctor.render.terminal import printable, printable_line, printable_lines

if TYPE_CHECKING:
    from jinja2 import Environment

SPECIAL = re.compile(r"([\\`*_{}\[\]|~#$!^])")
"""Characters with a meaning in GitHub's Markdown; ``<``, ``>`` and ``&`` become HTML entities."""

LINKED = re.compile(r"(?i)(?<=@)(?=[\w\[-])|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)")
"""Where an address, a mention, a reference or a mailbox would become a link. GitHub looks for them in what it
has rendered, so that no escape keeps it from it: a space of no width does."""

LIST_OR_HEADING = re.compile(r"^(\d{1,9})?([-+=.)])")
"""Start of a list item, or a line that makes the one above a heading."""


def as_markdown(page: Page) -> str:
    """Write a page, its details where a reader opens them."""
    name, *heading = page.heading
    written = [f"## {escaped(name)}", " · ".join(map(escaped, heading)), *_parts(page.parts)]
    if page.details:
        written.append("<details><summary>Details</summary>")
        for section in page.details:
            written += [f"**{escaped(section.title)}**", *_parts(section.parts)]
        written.append("</details>")
    return "\n\n".join(filter(None, written)) + "\n"


def escaped(text: str) -> str:
    """Write one line that Markdown shows as it is, and that links and notifies nobody."""
    unlinked = LINKED.sub("\N{ZERO WIDTH SPACE}", printable_line(text))
    plain = SPECIAL.sub(r"\\\1", html.escape(unlinked, quote=False))
    return LIST_OR_HEADING.sub(r"\1\\\2", plain)


def fenced(code: str) -> str:
    """Write a block of code that nothing inside can close."""
    lines = printable_lines(code)
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((fence, *lines, fence))


def _parts(parts: Sequence[Part]) -> Iterator[str]:
    layouts: dict[type, Callable[..., Iterable[str]]] = {
        str: lambda of: [escaped(of)],
        Quiet: lambda of: [escaped(of.text)],
        Strong: lambda of: [f"{_glyph(of.mark)}**{escaped(of.text)}**"],
        Next: lambda of: [],
        Marks: _marks,
        Code: lambda of: [fenced(of.code)],
        Table: lambda of: [_table(of)],
        Heatmap: lambda of: [_table(of.as_table())],
        Bars: _bars,
        Box: _box,
    }
    for part in parts:
        yield from layouts[type(part)](part)


def _glyph(mark: Mark | None) -> str:
    return f"{LOOKS[mark].emoji} " if mark else ""


def _box(said: Box) -> Iterator[str]:
    """Write the verdict, and a row for each question."""
    yield f"**{_glyph(TONES[said.tone])}{escaped(said.headline)}**"
    rows = [(f"**{row.label}**", "<br>".join(escaped(line.text) for line in row.lines)) for row in said.rows]
    yield _tabulated(("", ""), rows, ("left", "left"))


def _marks(part: Marks) -> Iterator[str]:
    """Write a list; the code of an item stands below it."""
    items: list[str] = []
    for each in part.rows:
        items.append(f"- {_glyph(each.mark)}{escaped(_named(each))}")
        if each.lines:
            yield from ("\n".join(items), fenced(each.lines))
            items = []
    yield "\n".join(items)


def _named(of: Marked) -> str:
    code = f" ({of.code})" if of.code not in of.text else ""
    return f"{f'{of.name}: ' if of.name else ''}{of.text}{code}"


def _bars(part: Bars) -> Iterator[str]:
    heads = ("", "ms/step", "speed", "GiB")
    rows = tuple(
        (each.label, f"{each.step} {each.spread}".rstrip(), each.speed, each.memory) for each in part.rows
    )
    yield _table(Table(heads, rows))


def _table(part: Table) -> str:
    heads = (*part.heads, part.text) if part.text else part.heads
    numbers = ("right",) * (len(part.heads) - 1)
    rows = [tuple(map(escaped, row)) for row in part.rows]
    return _tabulated(tuple(map(escaped, heads)), rows, ("left", *numbers, *(["left"] if part.text else [])))


def _tabulated(heads: Sequence[str], rows: Iterable[Sequence[str]], sides: Sequence[str]) -> str:
    from tabulate import tabulate

    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True, colalign=sides)


LINE = "\x1e"
"""Stands for the end of a line within text until a template is filled, so that no text begins a line: a build
server would obey ``::error::``."""


def as_html(page: Page, *, template: str = "page.html.jinja") -> str:
    """Write a page, its folded details where a reader opens them."""
    values = {"page": page, "title": page.title or page.heading[0], "looks": LOOKS, "families": [*FAMILIES]}
    return _templates().get_template(template).render(values).lstrip().replace(LINE, "&#10;")


@functools.cache
def _templates() -> Environment:
    from base64 import b64encode
    from hashlib import sha256

    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The page's policy names this script by its hash: a browser runs no other.
    copy = made.get_template("copy.js.jinja").render()
    made.globals["copy_hash"] = f"sha256-{b64encode(sha256(copy.encode()).digest()).decode()}"
    return made


def _shown(value: Any) -> Any:
    """Replace control characters and lone surrogates in text, but not in markup."""
    if type(value) is not str:
        return value
    return LINE.join(map(printable, value.replace("\r\n", "\n").replace("\t", "    ").split("\n")))
