"""A page as text: in the terminal's width, in colors or without, in ASCII if need be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fp8doctor.answer.items import Mark
from fp8doctor.answer.sentences import Box, Tone
from fp8doctor.answer.steps import Row
from fp8doctor.diagnosis.document import Document
from fp8doctor.render import report_page
from fp8doctor.render.page import (
    Bars,
    Code,
    Heatmap,
    Labelled,
    Marks,
    Next,
    Page,
    Part,
    Quiet,
    Strong,
    Table,
)
from fp8doctor.render.terminal import (
    BOLD,
    DIM,
    NARROWEST,
    columns,
    filled_up,
    printable_line,
    printable_lines,
    to_ascii,
    wrap,
)

MARKS: dict[Mark, tuple[str, str, str]] = {
    "bad": ("✗", "x", "1;31"),
    "warning": ("!", "!", "1;33"),
    "info": ("i", "i", "36"),
    "healthy": ("✓", "ok", "32"),
    "not_applicable": ("–", "-", "2"),
    "unknown": ("?", "?", "35"),
}
"""Mark -> glyph, the same in ASCII, and style."""

TONES: dict[Tone, tuple[Mark, str]] = {
    "bad": ("bad", "31"),
    "good": ("healthy", "32"),
    "plain": ("warning", "33"),
}
"""Tone of an answer -> its mark, and its colour."""

NOT_PROFILED = "not profiled"

FILLS = {
    "matmul": ("█", "M", "36"),
    "casts": ("▓", "C", "31"),
    "attention": ("▒", "A", "34"),
    "other": ("░", "o", ""),
    "idle": ("·", ".", "2"),
    NOT_PROFILED: ("╱", "/", "2"),
}
"""Part of a bar -> what fills it, the same in ASCII, and style: each differs without its colour."""

FRAMES = ("╭─╮│╰╯", "+-+|++")

CLOSE = {
    *(
        (Marks, Next),
        (Quiet, Next),
        (Code, Next),
        (Bars, Quiet),
        (Quiet, Quiet),
        (Marks, Marks),
        (Marks, Quiet),
    ),
    *((str, Labelled), (str, Code), (Strong, str), (Table, Quiet)),
}
"""Parts between which there is no empty line."""

LEAST_BAR, WIDEST_BAR = 10, 60
"""Columns below which a bar is not drawn, and beyond which it tells no more."""

NAMED = 24
"""Columns of a table's names that are shown at least."""

TEXT = 12
"""Columns of a table's text that are shown at least."""

TIED = "\ue000"
"""Stands for a blank at which no line is broken. Text never holds it: it is no printable character."""

UNITS = re.compile(r"(?<=±) (?=\d)|(?<=\d) (?=(?:%|ms|GiB)(?!\w))")
"""Blanks between a number and its sign or unit."""


def render(report: Document, *, quiet: bool = False, held_in: str = "", **form: Any) -> str:
    """Write a report as text; `as_text` takes its form, `fp8doctor.render.report_page.page` the rest."""
    return as_text(report_page.page(report, quiet=quiet, held_in=held_in), **form)


def as_text(
    page: Page, *, width: int = 100, colour: bool = False, ascii: bool = False, verbose: bool = False
) -> str:
    """Write a page, at most ``width`` columns wide; code stays whole. ``verbose`` adds the details."""
    paper = _Paper(max(width, NARROWEST), colour, ascii)
    first, *rest = page.parts
    head, parts = ([first], rest) if isinstance(first, Quiet) else ([], page.parts)
    blocks = [[*paper.side(page.heading, paper.bold), *(line for each in head for line in paper.of(each))]]
    blocks += paper.blocks(parts)
    for section in page.details if verbose else ():
        lines = [*paper.blocks(section.parts)]
        blocks += [[paper.bold(section.title)], *lines] if any(lines) else []
    text = "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"
    text = text.replace(TIED, " ")
    return to_ascii(text.replace("± ", "+-")) if ascii else text


class _Paper:
    """How wide a page is, in which colours, and with which glyphs."""

    def __init__(self, width: int, colour: bool, ascii: bool) -> None:
        self.width, self.colour, self.ascii = width, colour, ascii

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and style and text.strip() else text

    def bold(self, text: str) -> str:
        return self.paint(text, BOLD)

    def quiet(self, text: str) -> str:
        return self.paint(text, DIM)

    def mark(self, mark: Mark) -> str:
        return self.paint(MARKS[mark][self.ascii], MARKS[mark][2])

    def blocks(self, parts: Sequence[Part]) -> Iterator[list[str]]:
        """Lay parts out; what belongs to the part above follows it without an empty line."""
        lines: list[str] = []
        for part, before in zip(parts, (None, *parts), strict=False):
            if lines and (type(before), type(part)) not in CLOSE:
                yield lines
                lines = []
            lines += self.of(part)
        yield lines

    def of(self, part: Part) -> Iterable[str]:
        """Lay one part out as lines."""
        layouts: dict[type, Callable[..., Iterable[str]]] = {
            str: self.prose,
            Quiet: self.quietly,
            Strong: self.strong,
            Next: self.next,
            Labelled: lambda of: self.labelled(of.rows, self.quiet),
            Marks: self.marks,
            Code: lambda of: (f"      {line}".rstrip() for line in printable_lines(of.code)),
            Table: self.table,
            Heatmap: lambda of: self.table(of.as_table()),
            Bars: self.bars,
            Box: self.box,
        }
        return layouts[type(part)](part)

    def prose(self, text: str, indent: int = 0, style: str = "") -> list[str]:
        """Wrap a paragraph between its words; a number stays with its unit."""
        words = UNITS.sub(TIED, text if TIED in text else printable_line(text)).split(" ")
        return [" " * indent + self.paint(line, style) for line in wrap(words, self.width - indent)]

    def hanging(self, begin: str, taken: int, text: str, style: str = "") -> Iterator[str]:
        """Write a paragraph behind ``begin``, which takes so many columns; further lines are indented."""
        first, *rest = self.prose(text, taken, style) or [""]
        yield f"{begin}{first.lstrip()}".rstrip() if first.strip() else begin.rstrip()
        yield from rest

    def side(self, pieces: Iterable[str], paint: Callable[[str], str]) -> list[str]:
        told = [UNITS.sub(TIED, printable_line(each)) for each in pieces if each]
        return [paint(line) for line in wrap(told, self.width, joint=" · ")]

    def next(self, part: Next) -> Iterator[str]:
        begin = self.bold("Next") + "  "
        if part.command:
            yield f"{begin}This answers what is open:"
            yield f"      {printable_line(part.command)}"
            begin = " " * 6
        for line in _Paper(self.width - 6, self.colour, self.ascii).side(part.pieces, str):
            yield begin + line
            begin = " " * 6

    def quietly(self, part: Quiet) -> list[str]:
        """Wrap a sentence between its words, anything else between its pieces."""
        if part.text.endswith("."):
            return self.prose(part.text, style=DIM)
        return self.side(part.text.split(" · "), self.quiet)

    def strong(self, part: Strong) -> Iterator[str]:
        mark = f"{self.mark(part.mark)} " if part.mark else ""
        taken = len(MARKS[part.mark][self.ascii]) + 1 if part.mark else 0
        yield from self.hanging(mark, taken, part.text, BOLD)

    def labelled(self, rows: Sequence[tuple[str, str]], paint: Callable[[str], str]) -> Iterator[str]:
        wide = max((columns(label) for label, _ in rows), default=0) + 2
        for label, text in rows:
            yield from self.hanging(paint(label) + " " * (wide - columns(label)), wide, text)

    def marks(self, part: Marks) -> Iterator[str]:
        glyphs = [MARKS[each.mark][self.ascii] if each.mark else "" for each in part.rows]
        if part.in_a_line:
            told = [
                glyph + TIED + printable_line(each.text)
                for glyph, each in zip(glyphs, part.rows, strict=True)
            ]
            yield from wrap(told, self.width, joint="  ")
            return
        margin = max(map(len, glyphs)) + any(glyphs)
        name = max((columns(printable_line(each.name)) for each in part.rows), default=0)
        taken = margin + (name + 2 if name else 0)
        for each, glyph in zip(part.rows, glyphs, strict=True):
            begin = (self.mark(each.mark) if each.mark else "") + " " * (margin - len(glyph))
            begin += self.bold(filled_up(printable_line(each.name), name + 2)) if name else ""
            code = f"{TIED}{TIED}{each.code}" if each.code not in each.text else ""
            yield from self.hanging(begin, taken, printable_line(each.text) + code)
            yield from (" " * 6 + line for line in printable_lines(each.lines) if line)

    def table(self, part: Table) -> Iterator[str]:
        """Write a table, its head first; one that is too wide becomes a sentence for each row."""
        heads = (*part.heads, part.text) if part.text else part.heads
        rows = [tuple(map(printable_line, row)) for row in (heads, *part.rows)]
        shown = [
            cells
            for at, cells in enumerate(zip(*rows, strict=True))
            if at in (0, len(part.heads)) or not {*cells[1:]} <= {"", "-"}
        ]
        widths = [max(map(columns, cells)) for cells in shown]
        text = bool(part.text)
        spare = self.width - 2 * len(shown) - sum(widths[1 : len(widths) - text])
        widths[0] = min(widths[0], max(NAMED, spare - TEXT * text))
        if spare - TEXT * text < widths[0]:
            yield from self._sentences([*zip(*shown, strict=True)])
        elif part.rows:
            if text:
                widths[-1] = spare - widths[0]
            lefts = {0, len(widths) - text}
            for at, row in enumerate(zip(*shown, strict=True)):
                cells = (
                    filled_up(cell, wide, right=number not in lefts)
                    for number, (cell, wide) in enumerate(zip(row, widths, strict=True))
                )
                line = "  ".join(("", *cells)).rstrip()
                yield line if at else self.quiet(line)

    def _sentences(self, rows: Sequence[Sequence[str]]) -> Iterator[str]:
        heads, *rest = rows
        for name, *cells in rest:
            told = (
                f"{head} {cell}".strip()
                for head, cell in zip(heads[1:], cells, strict=True)
                if cell not in ("", "-")
            )
            yield from self.hanging("  ", 2, f"{name}: {', '.join(told)}.")

    def bars(self, part: Bars) -> Iterator[str]:
        """Draw the steps with a bar each; a narrow terminal has no memory, then no bar."""
        rows = part.rows
        cells = [(each.step, each.spread, each.speed, each.memory) for each in rows]
        step, spread, speed, gib = (max(map(len, column)) for column in zip(*cells, strict=True))
        speed, gib = (max(least, wide) if wide else 0 for least, wide in ((5, speed), (3, gib)))
        label = max(9, min(max(columns(printable_line(each.label)) for each in rows), self.width * 2 // 5))
        taken = label + 2 + step + (spread + 1 if spread else 0) + (speed + 2 if speed else 0)
        drawn = len(rows) > 1 or bool(part.segments(rows[0]))
        if self.width - taken - gib - 2 < (LEAST_BAR + 2 if drawn else 0):
            gib = 0
        room = min(WIDEST_BAR, self.width - taken - (gib + 2 if gib else 0) - 2)
        room = room if drawn and room >= LEAST_BAR else 0
        ends = ["speed".rjust(speed)] * bool(speed) + ["GiB".rjust(gib)] * bool(gib)
        width = label + 2 + step + (spread + 1 if spread else 0)
        head = "  ".join((filled_up("ms/step", width), *([" " * room] if room else []), *ends))
        yield self.quiet(head.rstrip())
        longest, styles = max(each.ms for each in rows), {"bad": "31", "good": "32"}
        for each in rows:
            first, *rest = wrap(printable_line(each.label).split(" "), label)
            times = f"{each.step:>{step}}" + (f" {each.spread:>{spread}}" if spread else "")
            style = styles.get(each.side, "")
            line = [self.paint(f"{filled_up(first, label)}  {times}", style)]
            line += [self._bar(part, each, room, longest)] if room else []
            line += [self.paint(f"{each.speed:>{speed}}", style)] if speed else []
            line += [f"{each.memory:>{gib}}"] if gib else []
            yield "  ".join(line).rstrip()
            yield from (self.paint(more, style) for more in rest)
        if room:
            yield from self._legend(part, "± 90% interval" if spread else "")

    def _fill(self, name: str, count: int = 1) -> str:
        """Draw a piece of this part of a bar."""
        return self.paint(FILLS[name][self.ascii] * count, FILLS[name][2])

    def _bar(self, part: Bars, row: Row, width: int, longest_ms: float) -> str:
        """Draw a step as its parts, to the scale of the longest."""
        bar, at_ms, end = "", 0.0, 0
        for name, ms in part.segments(row) or ((NOT_PROFILED, row.ms),):
            at_ms, start = at_ms + ms, end
            end = max(round(min(at_ms, row.ms) / longest_ms * width), start or 1)
            bar += self._fill(name, end - start)
        return bar + " " * (width - end)

    def _legend(self, part: Bars, spread: str) -> Iterator[str]:
        shown = {name for row in part.rows for name, _ in part.segments(row) or ((NOT_PROFILED, 0.0),)}
        named = [f"{FILLS[name][self.ascii]}{TIED}{name}" for name in FILLS if name in shown]
        for line in wrap([*named, spread], self.width, joint="  "):
            for name in shown:
                line = line.replace(f"{FILLS[name][self.ascii]}{TIED}", f"{self._fill(name)}{TIED}")
            yield line

    def box(self, said: Box) -> Iterator[str]:
        """Draw the answer in a frame: the verdict, and below it a row for each question."""
        mark, colour = TONES[said.tone]
        frame = FRAMES[self.ascii]
        inner = _Paper(self.width - 4, self.colour, self.ascii)
        glyph = MARKS[mark][self.ascii]
        style = f"1;{colour}"
        numbers = said.numbers.text if said.numbers else ""
        title, alone = printable_line(said.title.text), len(glyph) + 1
        if numbers and alone + columns(title) + 3 + columns(numbers) <= inner.width:
            lines = [f"{inner.paint(f'{glyph} {title}', style)}   {inner.bold(numbers)}"]
        else:
            lines = list(inner.hanging(inner.paint(f"{glyph} ", style), alone, title, style))
            lines += inner.prose(numbers, 2, BOLD) if numbers else []
        rows = [
            ("" if at else row.label, line.text) for row in said.rows for at, line in enumerate(row.lines)
        ]
        lines += inner.labelled(rows, inner.bold)
        edge = self.paint(frame[3], colour)
        yield self.paint(frame[0] + frame[1] * (self.width - 2) + frame[2], colour)
        for line in lines:
            bare = re.sub(r"\x1b\[[\d;]*m", "", line)
            yield f"{edge} {line}{' ' * (inner.width - columns(bare))} {edge}"
        yield self.paint(frame[4] + frame[1] * (self.width - 2) + frame[5], colour)
