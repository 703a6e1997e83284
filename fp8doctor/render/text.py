"""A page as text: in the terminal's width, in colors or without, in ASCII if need be."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fp8doctor.answer.items import Mark
from fp8doctor.answer.sentences import Box, Tone
from fp8doctor.answer.steps import Row
from fp8doctor.diagnosis.document import Document
from fp8doctor.render import report_page
from fp8doctor.render.page import (
    LOOKS,
    TONES,
    Bars,
    Code,
    Heatmap,
    Marks,
    Next,
    Page,
    Part,
    Quiet,
    Strong,
    Table,
    labelled,
)
from fp8doctor.render.terminal import (
    BOLD,
    DIM,
    NARROWEST,
    filled_up,
    printable_line,
    printable_lines,
    to_ascii,
    wrap,
)

COLOURS: dict[Tone, str] = {"bad": "31", "good": "32", "plain": "33"}

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

CLOSE = {
    *((kind, Next) for kind in (Marks, Quiet, Code)),
    *((kind, Quiet) for kind in (Marks, Quiet, Bars, Table)),
    *((str, Marks), (str, Code), (Strong, str)),
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
    blocks = [[*paper.side(page.heading, BOLD), *(line for each in head for line in paper.of(each))]]
    blocks += paper.blocks(parts)
    for section in page.details if verbose else ():
        lines = [*paper.blocks(section.parts)]
        blocks += [[paper.paint(section.title, BOLD)], *lines] if any(lines) else []
    text = "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"
    text = text.replace(TIED, " ")
    return to_ascii(text.replace("± ", "+-")) if ascii else text


def _tied(text: str) -> str:
    """Write one printable line whose numbers stay with their units."""
    return UNITS.sub(TIED, printable_line(text))


class _Paper:
    """How wide a page is, in which colours, and with which glyphs."""

    def __init__(self, width: int, colour: bool, ascii: bool) -> None:
        self.width, self.colour, self.ascii = width, colour, ascii

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and style and text.strip() else text

    def glyph(self, mark: Mark | None) -> str:
        return "" if mark is None else LOOKS[mark].ascii if self.ascii else LOOKS[mark].glyph

    def mark(self, mark: Mark | None, width: int) -> str:
        """Write a mark, and blanks up to this width."""
        glyph = self.glyph(mark)
        return (self.paint(glyph, LOOKS[mark].style) if mark else "") + " " * (width - len(glyph))

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
        layouts: dict[type, Callable[..., Iterable[str]]] = {
            str: self.prose,
            Quiet: self.quietly,
            Strong: self.strong,
            Next: self.next,
            Marks: self.marks,
            Code: lambda of: (f"      {line}".rstrip() for line in printable_lines(of.code)),
            Table: self.table,
            Heatmap: lambda of: self.table(of.as_table()),
            Bars: self.bars,
            Box: self.box,
        }
        return layouts[type(part)](part)

    def prose(self, text: str, indent: int = 0, style: str = "", *, end: str = "") -> list[str]:
        """Wrap a paragraph between its words; a number stays with its unit, ``end`` with the last word."""
        tied = _tied(text) + (f"{TIED}{TIED}{printable_line(end)}" if end else "")
        lines = wrap(tied.split(" "), self.width - indent)
        return [" " * indent + self.paint(line.rstrip(f" {TIED}"), style) for line in lines]

    def hanging(self, begin: str, taken: int, text: str, style: str = "", *, end: str = "") -> Iterator[str]:
        """Write a paragraph behind ``begin``, which takes so many columns; further lines are indented."""
        first, *rest = self.prose(text, taken, style, end=end) or [""]
        yield f"{begin}{first.lstrip()}".rstrip() if first.strip() else begin.rstrip()
        yield from rest

    def side(self, pieces: Iterable[str], style: str) -> list[str]:
        """Write short pieces side by side, each kept whole."""
        told = map(_tied, filter(None, pieces))
        return [self.paint(line, style) for line in wrap(told, self.width, joint=" · ")]

    def next(self, part: Next) -> Iterator[str]:
        begin = self.paint("Next", BOLD) + "  "
        if part.command:
            yield f"{begin}This answers what is open:"
            yield f"      {printable_line(part.command)}"
            begin = " " * 6
        for line in _Paper(self.width - 6, self.colour, self.ascii).side(part.pieces, ""):
            yield begin + line
            begin = " " * 6

    def quietly(self, part: Quiet) -> list[str]:
        """Wrap a sentence between its words, anything else between its pieces."""
        if part.text.endswith("."):
            return self.prose(part.text, style=DIM)
        return self.side(part.text.split(" · "), DIM)

    def strong(self, part: Strong) -> Iterator[str]:
        taken = len(self.glyph(part.mark)) + 1 if part.mark else 0
        return self.hanging(self.mark(part.mark, taken), taken, part.text, BOLD)

    def marks(self, part: Marks) -> Iterator[str]:
        margin = max(len(self.glyph(each.mark)) + bool(each.mark) for each in part.rows)
        name = max(len(printable_line(each.name)) for each in part.rows)
        name += 2 if name else 0
        for each in part.rows:
            begin = self.mark(each.mark, margin)
            begin += self.paint(filled_up(printable_line(each.name), name), BOLD) if name else ""
            code = each.code if each.code not in each.text else ""
            yield from self.hanging(begin, margin + name, each.text, end=code)
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
        widths = [max(map(len, cells)) for cells in shown]
        text = bool(part.text)
        spare = self.width - 2 * len(shown) - sum(widths[1 : len(widths) - text])
        widths[0] = min(widths[0], max(NAMED, spare - TEXT * text))
        names, *others = shown
        if spare - TEXT * text < widths[0]:
            for name, *cells in zip(names, *others, strict=True):
                told = (
                    f"{head} {cell}".strip()
                    for (head, *_), cell in zip(others, cells, strict=True)
                    if cell not in ("", "-")
                )
                if name != names[0]:
                    yield from self.hanging("  ", 2, f"{name}: {', '.join(told)}.")
        elif part.rows:
            if text:
                widths[-1] = spare - widths[0]
            for at, row in enumerate(zip(*shown, strict=True)):
                line = (
                    filled_up(cell, wide, right=number not in (0, len(widths) - text))
                    for number, (cell, wide) in enumerate(zip(row, widths, strict=True))
                )
                yield self.paint("  ".join(("", *line)).rstrip(), "" if at else DIM)

    def bars(self, part: Bars) -> Iterator[str]:
        """Draw the steps with a bar each; a narrow terminal has no memory, then no bar."""
        rows = part.rows
        step, spread = max(len(row.step) for row in rows), max(len(row.spread) for row in rows)
        times = [f"{row.step:>{step}}" + (f" {row.spread:>{spread}}" if spread else "") for row in rows]
        label = max(9, min(max(len(printable_line(row.label)) for row in rows), self.width * 2 // 5))
        ends = {"speed": [row.speed for row in rows], "GiB": [row.memory for row in rows]}
        wide = {head: max(len(head), *map(len, cells)) for head, cells in ends.items() if any(cells)}
        spare = self.width - label - len(times[0]) - 4 - sum(2 + each for each in wide.values())
        drawn = len(rows) > 1 or bool(part.segments(rows[0]))
        if "GiB" in wide and spare < (LEAST_BAR if drawn else -2):
            spare += 2 + wide.pop("GiB")
        room = min(WIDEST_BAR, spare) if drawn and spare >= LEAST_BAR else 0
        head = [filled_up("ms/step", label + 2 + len(times[0])), *([" " * room] if room else [])]
        head += [each.rjust(width) for each, width in wide.items()]
        yield self.paint("  ".join(head).rstrip(), DIM)
        longest, styles = max(row.ms for row in rows), {"bad": "31", "good": "32"}
        for at, row in enumerate(rows):
            first, *more = wrap(printable_line(row.label).split(" "), label)
            style = styles.get(row.side, "")
            line = [self.paint(f"{filled_up(first, label)}  {times[at]}", style)]
            line += [self._bar(part, row, room, longest)] if room else []
            for name, width in wide.items():
                line.append(self.paint(f"{ends[name][at]:>{width}}", style if name == "speed" else ""))
            yield "  ".join(line).rstrip()
            yield from (self.paint(each, style) for each in more)
        if room:
            yield from self._legend(part)

    def _fill(self, name: str, count: int = 1) -> str:
        return self.paint(FILLS[name][self.ascii] * count, FILLS[name][2])

    def _bar(self, part: Bars, row: Row, width: int, longest_ms: float) -> str:
        """Draw a step as its parts, to the scale of the longest."""
        bar, at_ms, end = "", 0.0, 0
        for name, ms in part.segments(row) or ((NOT_PROFILED, row.ms),):
            at_ms, start = at_ms + ms, end
            end = max(round(min(at_ms, row.ms) / longest_ms * width), start or 1)
            bar += self._fill(name, end - start)
        return bar + " " * (width - end)

    def _legend(self, part: Bars) -> Iterator[str]:
        shown = {name for row in part.rows for name, _ in part.segments(row) or ((NOT_PROFILED, 0.0),)}
        named = [f"{FILLS[name][self.ascii]}{TIED}{name}" for name in FILLS if name in shown]
        for line in wrap([*named, "± holds 9 of 10 new runs"], self.width, joint="  "):
            for name in shown:
                line = line.replace(f"{FILLS[name][self.ascii]}{TIED}", f"{self._fill(name)}{TIED}")
            yield line

    def box(self, said: Box) -> Iterator[str]:
        """Draw the answer in a frame: the verdict, and below it a row for each question."""
        mark, colour = TONES[said.tone], COLOURS[said.tone]
        frame = "+-+|++" if self.ascii else "╭─╮│╰╯"
        inner = _Paper(self.width - 4, self.colour, self.ascii)
        glyph, style = self.glyph(mark), f"1;{colour}"
        numbers = said.numbers.text if said.numbers else ""
        title, alone = printable_line(said.title.text), len(glyph) + 1
        if numbers and alone + len(title) + 3 + len(numbers) <= inner.width:
            lines = [f"{inner.paint(f'{glyph} {title}', style)}   {inner.paint(numbers, BOLD)}"]
        else:
            lines = list(inner.hanging(inner.paint(f"{glyph} ", style), alone, title, style))
            lines += inner.prose(numbers, 2, BOLD) if numbers else []
        rows = [
            ("" if at else row.label, line.text) for row in said.rows for at, line in enumerate(row.lines)
        ]
        lines += inner.of(labelled(rows)) if rows else []
        edge = self.paint(frame[3], colour)
        yield self.paint(frame[0] + frame[1] * (self.width - 2) + frame[2], colour)
        for line in lines:
            bare = re.sub(r"\x1b\[[\d;]*m", "", line)
            yield f"{edge} {line}{' ' * (inner.width - len(bare))} {edge}"
        yield self.paint(frame[4] + frame[1] * (self.width - 2) + frame[5], colour)
