"""The first screen drawn by rich: in the terminal's width, colors or ASCII."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

from msgspec import Struct

from fp8doctor.answer.sentences import Box, Tone
from fp8doctor.render.planned_fixes import Fix
from fp8doctor.render.rank_lines import RankLines
from fp8doctor.render.screen import Screen, VariantRow
from fp8doctor.render.terminal import ASCII, columns, printable_line, printable_lines, to_ascii
from fp8doctor.render.words import FAMILIES, MARKS, NOT_PROFILED, Mark

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

TONES: dict[Tone, tuple[Mark, str]] = {
    "bad": ("bad", "red"),
    "good": ("healthy", "green"),
    "plain": ("warning", "yellow"),
}
"""Tone of an answer -> its mark, and its colour."""

FILLS = {
    "matmul": ("█", "M", "cyan"),
    "casts": ("▓", "C", "red"),
    "attention": ("▒", "A", "blue"),
    "other": ("░", "o", ""),
    "idle": ("·", ".", "dim"),
    NOT_PROFILED: ("╱", "/", "dim"),
}
"""Part of a bar -> what fills it, the same in ASCII, and style: each differs without its colour."""


LEAST_BAR = 10
"""Columns below which a bar of the variants is not drawn."""

WIDEST_BAR = 60
"""Columns beyond which a bar tells no more."""

GAP = 2
"""Columns between two columns of a table."""

AT_LINE_ENDS = re.compile(r"(?:[ ]|\x1b\[[\d;]*m)+(?=\n)")
"""Blanks that only fill a line up, among changes of style."""

TIED = "\ue000"
"""Stands for a blank at which no line is broken. Text never holds it: it is no printable character."""

UNITS = re.compile(r"(?<=±) (?=\d)|(?<=\d) (?=(?:%|ms|GiB)(?!\w))")
"""Blanks between a number and its sign or unit."""


class Canvas(Struct, frozen=True):
    """The width, and whether it takes ASCII alone."""

    width: int
    ascii: bool

    def text(self, text: str, style: str = "") -> Text:
        """Make a line that a terminal shows as it is.

        Characters that terminals and rich count differently are replaced.
        """
        from rich.cells import cell_len

        line = printable_line(text).replace("\N{VARIATION SELECTOR-16}", "")
        if not (self.ascii or line.isascii()):
            line = "".join(each if cell_len(each) == columns(each) else "\ufffd" for each in line)
        return self.own(line, style)

    def own(self, text: str, style: str = "") -> Text:
        """Make a line of text of our own, with its blanks."""
        from rich.text import Text

        plain = text.replace("± ", "+-").translate(ASCII).encode("ascii", "replace").decode()
        return Text.assemble((UNITS.sub(TIED, plain if self.ascii else text), style))

    def glyph(self, of: tuple[str, str, str]) -> str:
        return of[self.ascii]

    def mark(self, mark: Mark) -> Text:
        return self.own(self.glyph(MARKS[mark]), MARKS[mark][2])

    def packed(self, pieces: Iterable[Text], joint: str = " · ", indent: int = 0) -> Iterator[Text]:
        """Put pieces side by side, broken between two of them; further lines are indented."""
        line, between = self.own(""), self.own(joint)
        for piece in pieces:
            if line and line.cell_len + between.cell_len + piece.cell_len <= self.width:
                line = line + between + piece
            else:
                if line:
                    yield line
                line = self.own(" " * indent) + piece if line else piece
        if line:
            yield line


def draw(screen: Screen, *, width: int, colour: bool, ascii: bool) -> str:
    with _random_state_kept():
        return _drawn(screen, Canvas(width, ascii), colour=colour)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Keep Python's random numbers, of which rich draws one at import."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


def _drawn(screen: Screen, canvas: Canvas, *, colour: bool) -> str:
    sections: list[Sequence[RenderableType]] = [
        tuple(_heading(screen, canvas)) if screen.job else (),
        (_panel(screen.box, canvas),),
        *(tuple(_fix(each, canvas)) for each in screen.fixes),
        tuple(_steps(screen, canvas)),
        tuple(_facts(screen.facts, canvas)) if screen.facts else (),
        tuple(_ranks(screen.ranks, canvas)) if screen.ranks else (),
        tuple(_rest(screen, canvas)),
    ]
    return "\n".join(_shown([*section], canvas.width, colour) for section in sections if section)


def _shown(lines: Iterable[RenderableType], width: int, colour: bool) -> str:
    """Let rich write the lines, without blanks at their ends."""
    from rich.console import Console

    file = StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        force_jupyter=False,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        _environ={},
    )
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, CodeLine))
    drawn = file.getvalue().replace(TIED, " ")
    return AT_LINE_ENDS.sub(lambda found: found.group().replace(" ", ""), drawn)


class CodeLine(Struct, frozen=True):
    """A line of code, which stays whole so that it can be copied."""

    text: str

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(self.text, no_wrap=True, overflow="ignore")


BARE, BELOW = ("FP8", "attention"), ("Memory", "Tokens/s")
"""Facts of the job that need no label in the heading, and those that stand below the table."""


def _heading(screen: Screen, canvas: Canvas) -> Iterator[Text]:
    name, *job = screen.job
    yield from canvas.packed([canvas.text(name, "bold"), *map(canvas.text, job)])
    told = [
        each if label in BARE else f"{label} {each}" for label, each in screen.facts if label not in BELOW
    ]
    yield from canvas.packed([canvas.text(each, "dim") for each in (*screen.machine, *told)])


def _panel(said: Box, canvas: Canvas) -> RenderableType:
    """Draw the answer in a box: the verdict, and below it a row for each question."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel

    mark, colour = TONES[said.tone]
    what = canvas.own(f"{canvas.glyph(MARKS[mark])} ") + canvas.text(said.title.text)
    what.stylize(f"bold {colour}")
    numbers = canvas.text(said.numbers.text if said.numbers else "", "bold")
    head: list[RenderableType]
    if not said.numbers:
        head = [what]
    elif what.cell_len + 3 + numbers.cell_len <= canvas.width - 4:
        head = [what + canvas.own("   ") + numbers]
    else:
        head = [what, Padding(numbers, (0, 0, 0, 2))]
    rows = _labelled("bold")
    for row in said.rows:
        for at, line in enumerate(row.lines):
            rows.add_row("" if at else row.label, canvas.text(line.text))
    return Panel(
        Group(*head, rows),
        box=box.ASCII if canvas.ascii else box.ROUNDED,
        border_style=colour,
        width=canvas.width,
    )


def _steps(screen: Screen, canvas: Canvas) -> Iterator[RenderableType]:
    """Draw the variants with a bar each, and what the bars are made of."""
    from rich.table import Table

    if screen.variants:
        wide = _Widths.of(screen.variants, canvas)
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(width=wide.label, overflow="fold")
        table.add_column(width=wide.step, no_wrap=True)
        if wide.bar:
            table.add_column(width=wide.bar, no_wrap=True)
        for width in filter(None, (wide.speed, wide.memory)):
            table.add_column(width=width, no_wrap=True, justify="right")
        shown = ((True, "ms/step"), (True, ""), (wide.bar, ""), (wide.speed, "speed"), (wide.memory, "GiB"))
        table.add_row(*(head for is_shown, head in shown if is_shown), style="dim")
        for each in screen.variants:
            table.add_row(*_row(each, wide, canvas, max(one.ms for one in screen.variants)))
        yield table
        named = [*(_legend(screen.variants, canvas) if wide.bar else ())]
        spread = [canvas.text("± 90% interval")] if wide.spread else []
        yield from canvas.packed([*named, *spread], "  ")
    for told in filter(None, (screen.method, screen.untimed)):
        yield canvas.text(told, "dim")


class _Widths(Struct, frozen=True):
    """Columns of the table; 0 if there is no space for one, or nothing in it."""

    label: int
    number: int
    spread: int
    bar: int
    speed: int
    memory: int

    @property
    def step(self) -> int:
        return self.number + (1 + self.spread if self.spread else 0)

    @classmethod
    def of(cls, variants: Sequence[VariantRow], canvas: Canvas) -> _Widths:
        """Give every column its width, and the bar the rest; if too little, no memory.

        A lone step without parts has no bar: there is nothing to compare its length with.
        """
        bars = len(variants) > 1 or bool(variants[0].parts)
        widest = max(canvas.text(each.label).cell_len for each in variants)
        number, spread = (max(len(getattr(each, of)) for each in variants) for of in ("step", "spread"))
        memory = max(len(each.memory) for each in variants)
        speed = max(len(each.speed) for each in variants)
        speed = max(5, speed) if speed else 0
        label = max(9, min(widest, canvas.width * 2 // 5))
        fixed = label + number + (1 + spread if spread else 0) + 2 * GAP + (speed + GAP if speed else 0)
        for gib in (max(3, memory) if memory else 0, 0):
            room = canvas.width - fixed - (gib + GAP if gib else 0)
            if room >= (LEAST_BAR if bars else 0):
                return cls(label, number, spread, min(room, WIDEST_BAR) if bars else 0, speed, gib)
        return cls(label, number, spread, 0, speed, 0)


def _row(variant: VariantRow, wide: _Widths, canvas: Canvas, longest_ms: float) -> Iterator[Text]:
    style = {"bad": "red", "good": "green", "plain": ""}[variant.tone]
    yield canvas.text(variant.label, style)
    spread = f" {variant.spread:>{wide.spread}}" if wide.spread else ""
    yield canvas.own(f"{variant.step:>{wide.number}}{spread}", style)
    if wide.bar:
        yield _bar(variant, wide.bar, canvas, longest_ms)
    if wide.speed:
        yield canvas.text(variant.speed, style)
    if wide.memory:
        yield canvas.text(variant.memory)


def _bar(variant: VariantRow, width: int, canvas: Canvas, longest_ms: float) -> Text:
    """Draw a step as its parts, to the scale of the longest."""
    from rich.text import Text

    bar, at_ms, drawn = Text(), 0.0, 0
    for name, ms in variant.parts or ((NOT_PROFILED, variant.ms),):
        at_ms += ms
        end = max(round(min(at_ms, variant.ms) / longest_ms * width), 0 if drawn else 1)
        bar.append(canvas.glyph(FILLS[name]) * (end - drawn), FILLS[name][2])
        drawn = end
    return bar


def _legend(variants: Iterable[VariantRow], canvas: Canvas) -> Iterator[Text]:
    shown = {name for each in variants for name, _ in each.parts or ((NOT_PROFILED, 0.0),)}
    for name in (*FAMILIES, NOT_PROFILED):
        if name in shown:
            yield canvas.own(canvas.glyph(FILLS[name]), FILLS[name][2]) + canvas.own(f" {name}")


def _labelled(style: str = "", gap: int = GAP) -> Table:
    """Make a table of two columns: labels, and text that is wrapped."""
    from rich.table import Table

    rows = Table.grid(padding=(0, gap, 0, 0))
    rows.add_column(no_wrap=True, style=style)
    rows.add_column(overflow="fold")
    return rows


def _facts(facts: Sequence[tuple[str, str]], canvas: Canvas) -> Iterator[RenderableType]:
    """Write the memory and the rate of the step."""
    rows = _labelled("dim")
    for each in facts:
        if each[0] in BELOW:
            rows.add_row(*map(canvas.text, each))
    if rows.row_count:
        yield rows


def _ranks(ranks: RankLines, canvas: Canvas) -> Iterator[RenderableType]:
    """Write a line for the job, and its ranks with their numbers in screen."""
    rows = _labelled("bold")
    for row in (*ranks.each, *([("", ranks.more)] if ranks.more else [])):
        rows.add_row(*map(canvas.text, row))
    yield canvas.text(ranks.job)
    if rows.row_count:
        yield rows


def _fix(fix: Fix, canvas: Canvas) -> Iterator[RenderableType]:
    """Draw a step of the plan, whose summary is in the box: its saving, code, and the lines to write."""
    from rich.table import Table

    row = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    row.width = canvas.width
    row.add_column(no_wrap=True, style="bold green")
    row.add_column(ratio=1, overflow="fold")
    row.add_column(no_wrap=True, justify="right", vertical="bottom", style="dim")
    row.add_row(f"Fix {fix.number}", canvas.text(fix.aside), canvas.text(fix.code))
    yield row
    for line in printable_lines(fix.lines) if fix.lines else ():
        yield CodeLine(f"       {to_ascii(line) if canvas.ascii else line}")


def _rest(screen: Screen, canvas: Canvas) -> Iterator[RenderableType]:
    """Write notices, areas, and the next commands."""
    lines = _labelled(gap=1)
    for each in screen.notices:
        code = "" if each.code in each.text else f"  {each.code}"
        lines.add_row(canvas.mark(each.mark), canvas.text(each.text) + canvas.own(code, "dim"))
    if screen.notes:
        lines.add_row(canvas.mark("info"), canvas.text(screen.notes))
    if lines.row_count:
        yield lines
    areas = (canvas.mark(mark) + canvas.own(" ") + canvas.text(text) for mark, text in screen.areas)
    yield from canvas.packed(areas, "  ")
    for text in filter(None, (screen.made_up, f"Ignored: {screen.ignored}" if screen.ignored else "")):
        yield canvas.text(text, "dim")
    if screen.next:
        yield from _next(screen, canvas)


def _next(screen: Screen, canvas: Canvas) -> Iterator[RenderableType]:
    """Write the next commands side by side; one too long for a line stands alone."""
    start, pieces = canvas.own("Next  ", "bold"), []
    for piece in screen.next:
        if screen.command and piece.startswith(screen.command) and len(piece) > canvas.width - len(start):
            yield start + canvas.text(f"This {piece.removeprefix(screen.command).strip() or 'leads on'}:")
            command = printable_line(screen.command)
            yield CodeLine(f"{'':{len(start)}}{to_ascii(command) if canvas.ascii else command}")
            start = canvas.own(" " * len(start))
        else:
            pieces.append(canvas.text(piece))
    first, *others = pieces
    yield from canvas.packed([start + first, *others], indent=len(start))
