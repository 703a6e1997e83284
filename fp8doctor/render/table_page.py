"""A page of paragraphs and tables, as text, as Markdown and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from fp8doctor.render.markdown import escaped, fenced, table
from fp8doctor.render.terminal import (
    BOLD,
    DIM,
    NARROWEST,
    columns,
    printable_line,
    printable_lines,
    to_ascii,
    wrap,
)


class Table(Struct, frozen=True):
    """Rows of cells: a name, then numbers, then text if there is a head for it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str = ""
    """Head of a last column of text, which is cut to the width; empty without one."""


class Code(Struct, frozen=True):
    """Lines that are shown as they are."""

    code: str


SHADES = "·░▒▓█"
"""Of a `Heatmap`, from sound to worst; ``-`` is unknown."""


class Heatmap(Struct, frozen=True):
    """Rows of numbers over time, as shades."""

    title: str
    columns: tuple[str, ...]
    """What each column is, for readers of HTML; the first and the last are shown."""
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    limits: tuple[float, ...]
    """A number below the n-th has at least the n-th shade."""

    def shade(self, number: float) -> int:
        """Return 0 for a sound number, up to the count of limits."""
        return sum(number < each for each in self.limits)

    def as_table(self) -> Table:
        """Draw it in characters."""
        drawn = (
            (name, "".join("-" if each is None else SHADES[self.shade(each)] for each in numbers))
            for name, numbers in self.rows
        )
        return Table((self.title,), tuple(drawn), text=f"{self.columns[0]} to {self.columns[-1]}")


class Sheet(Struct, frozen=True):
    """A page, in reading order."""

    heading: tuple[str, ...]
    """Short parts, side by side."""
    verdict: tuple[str, ...]
    parts: tuple[Table | Code | Heatmap | str, ...]
    basis: str
    """How the numbers were taken."""


def as_text(sheet: Sheet, *, width: int, colour: bool = False, ascii: bool = False) -> str:
    """Write the page as text, at most ``width`` columns wide."""
    width = max(width, NARROWEST)

    def paint(line: str, code: str) -> str:
        return f"\x1b[{code}m{line}\x1b[0m" if colour and line else line

    paragraphs = [wrap(map(printable_line, sheet.heading), width, joint=" · ")]
    paragraphs += [[paint(line, BOLD) for line in _prose(each, width)] for each in sheet.verdict]
    for part in sheet.parts:
        if isinstance(part, str):
            paragraphs.append(_prose(part, width))
        elif isinstance(part, Code):
            paragraphs.append([f"    {line}" for line in printable_lines(part.code)])
        else:
            head, *rows = _lines(part.as_table() if isinstance(part, Heatmap) else part, width)
            paragraphs.append([paint(head, DIM), *rows])
    paragraphs.append([paint(line, DIM) for line in _prose(sheet.basis, width)])
    text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
    return to_ascii(text) if ascii else text


def as_markdown(sheet: Sheet) -> str:
    """Write the page as Markdown; nothing from a file is read as markup."""
    return "\n\n".join(_markdown(sheet)) + "\n"


def as_html(sheet: Sheet) -> str:
    """Write the page as HTML; nothing from a file is read as HTML."""
    from fp8doctor.render.templates import fill

    return fill("sheet.html.jinja", sheet=sheet)


def _markdown(sheet: Sheet) -> Iterator[str]:
    first, *others = sheet.heading
    yield f"## {escaped(first)}"
    if others:
        yield " · ".join(map(escaped, others))
    yield from (f"**{escaped(each)}**" for each in sheet.verdict)
    for part in sheet.parts:
        if isinstance(part, str):
            yield escaped(part)
            continue
        if isinstance(part, Code):
            yield fenced(part.code)
            continue
        part = part.as_table() if isinstance(part, Heatmap) else part
        heads = (*part.heads, part.text) if part.text else part.heads
        rows = [tuple(map(escaped, row)) for row in part.rows]
        yield table(tuple(map(escaped, heads)), rows, len(part.heads) - 1, texts=bool(part.text))
    if sheet.basis:
        yield escaped(sheet.basis)


def _prose(text: str, width: int) -> list[str]:
    return wrap(printable_line(text).split(" "), width)


def _lines(of: Table, width: int) -> list[str]:
    """Write a table's lines, its head first; names that are too wide are cut."""
    numbers = len(of.heads)
    rows = [tuple(map(printable_line, row)) for row in (of.heads, *of.rows)]
    widths = [max(columns(row[at]) for row in rows) for at in range(numbers)]
    widths[0] = min(widths[0], max(12, width - sum(widths[1:]) - 2 * numbers))
    lines = []
    for row, text in zip(rows, (of.text, *(row[numbers:] for row in of.rows)), strict=True):
        cells = [_cut(row[0], widths[0]), *(_right(row[at], widths[at]) for at in range(1, numbers))]
        line = "  " + "  ".join(cells)
        if of.text:
            shown = text if isinstance(text, str) else printable_line(text[0])
            line += "  " + _cut(shown, max(12, width - columns(line) - 2)).rstrip()
        lines.append(line.rstrip())
    return lines


def _right(text: str, width: int) -> str:
    return " " * (width - columns(text)) + text


def _cut(text: str, width: int) -> str:
    """Fill up to a width, or cut to it and say so."""
    if columns(text) <= width:
        return text + " " * (width - columns(text))
    kept = "".join(_within(text, width - 3))
    return kept + "..." + " " * (width - 3 - columns(kept))


def _within(text: Iterable[str], width: int) -> Iterator[str]:
    for character in text:
        width -= columns(character)
        if width < 0:
            return
        yield character
