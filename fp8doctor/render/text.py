"""The report as text: the first screen, and with ``-v`` everything that is known below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.render import environment
from fp8doctor.render.front import front
from fp8doctor.render.front_text import draw
from fp8doctor.render.ledger import ledger_table
from fp8doctor.render.marks import MARKS, Line, Mark
from fp8doctor.render.outcomes import without_findings
from fp8doctor.render.rates import rates_in_words
from fp8doctor.render.screen import Entry, Screen, first_screen
from fp8doctor.render.support import for_support, not_timed, variables
from fp8doctor.render.terminal import columns, printable_line, printable_lines, to_ascii, wrap
from fp8doctor.render.timing import Timing

GLYPHS = {mark: shown[0] for mark, shown in MARKS.items()}
ASCII_GLYPHS = {mark: shown[1] for mark, shown in MARKS.items()}
COLOURS: dict[Mark, str] = {
    "bad": "1;31",
    "warning": "1;33",
    "info": "36",
    "healthy": "32",
    "not_applicable": "2",
    "unknown": "35",
}
BOLD, DIM = "1", "2"

NARROWEST = 40
"""Columns below which nothing is laid out; a narrower terminal breaks the lines by itself."""

Paint = Callable[[str, str], str]


def render(
    report: Document,
    *,
    width: int = 100,
    colour: bool = False,
    ascii: bool = False,
    verbose: bool = False,
    quiet: bool = False,
    held_in: str = "",
) -> str:
    """Write the report as text, at most ``width`` columns wide except for lines of code, which stay whole so
    that they can be copied.

    ``verbose`` puts everything that is known below the answer, ``quiet`` leaves only the answer and findings
    that are at least a warning. ``held_in`` names the variable of Python that holds the report.
    """
    width = max(width, NARROWEST)
    page = _Page(width, _coloured if colour else _plain, ASCII_GLYPHS if ascii else GLYPHS)
    if environment.no_model(report):
        paragraphs = page.environment(report, verbose=verbose, quiet=quiet)
        text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
        return to_ascii(text) if ascii else text
    first = front(report, quiet=quiet, whole=verbose, held_in=held_in)
    drawn = draw(first, width=width, colour=colour, ascii=ascii, whole=not verbose)
    if not verbose:
        return drawn
    paragraphs = page.paragraphs(first_screen(report, whole=True), report)
    text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
    return f"{drawn}\n{to_ascii(text) if ascii else text}"


def _plain(text: str, colour: str) -> str:
    return text


def _coloured(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


class _Page:
    """One rendering: how wide, in which colours, with which glyphs."""

    def __init__(self, width: int, paint: Paint, glyphs: dict[Mark, str]) -> None:
        self.width, self.paint, self.glyphs = width, paint, glyphs
        self.margin = max(map(len, glyphs.values())) + 3
        """Columns of the widest mark and the space behind it."""

    def paragraphs(self, screen: Screen, report: Document) -> Iterator[list[str]]:
        yield [*self.heading(screen), *self.joined(screen.counts)]
        yield [self.paint(line, BOLD) for line in self.prose(screen.verdict)]
        yield self.timing(screen.timing)
        yield [line for each in (screen.ranks.lines if screen.ranks else ()) for line in self.prose(each)]
        yield [*self.rows(screen.troubles), *self.areas(screen.areas)]
        yield self.prose(screen.all_clear)
        for entry in screen.prescription:
            yield self.entry(entry)
        yield [*self.prose(screen.folded), *self.outlook(screen.outlook)]
        for entry in screen.others:
            yield self.entry(entry)
        yield self.rows(screen.outcomes)
        yield self.ledger(report, screen)
        yield self.rates(report, screen)
        yield self.gaps(report)
        yield self.joined((*for_support(report.facts), *variables(report.facts)))
        yield [
            *self.prose(screen.made_up),
            *self.not_looked_at(screen),
            *self.more(screen),
        ]
        if report.created_at:
            yield self.prose(f"Recorded {report.created_at} by fp8doctor {report.tool.version}.", colour=DIM)

    def environment(self, report: Document, *, verbose: bool, quiet: bool) -> Iterator[list[str]]:
        """Write whether the machine can train in FP8, and what is there, a line each; where no model was."""
        mark, verdict = environment.says(report)
        first, *rest = self.prose(verdict, 2)
        yield [f"fp8doctor {report.tool.version}"]
        yield [f"{self.paint(self.glyphs[mark], COLOURS[mark])} {self.paint(first.lstrip(), BOLD)}", *rest]
        items = list(environment.items(report, quiet=quiet))
        name_width = max((len(each.name) for each in items), default=0)
        margin = max(map(len, self.glyphs.values())) + 1
        lines = []
        for each in items:
            glyph = self.glyphs[each.mark]
            first, *rest = self.prose(each.text, margin + name_width + 2) or [""]
            head = f"{self.paint(glyph, COLOURS[each.mark])}{' ' * (margin - len(glyph))}"
            lines += [f"{head}{each.name:<{name_width}}  {first.lstrip()}", *rest]
            lines += [" " * (margin + 4) + line for line in printable_lines(each.lines) if line]
        yield lines
        if verbose:
            shown = {word for each in items for word in each.text.split()}
            yield self.joined(each for each in for_support(report.facts) if each.split()[-1] not in shown)
            yield self.rows(without_findings([each for each in report.outcomes if each.outcome != "unknown"]))
            yield self.gaps(report)
        elif not quiet:
            yield self.prose("Next: fp8doctor model.py times a model on a GPU")

    def heading(self, screen: Screen) -> list[str]:
        """Machine and model on one line where they fit."""
        together = self.joined((*screen.machine, screen.model))
        return (
            together if len(together) == 1 else [*self.joined(screen.machine), *self.joined([screen.model])]
        )

    def joined(self, parts: Iterable[str]) -> list[str]:
        """Short parts side by side, broken between two of them."""
        return wrap(filter(None, map(printable_line, parts)), self.width, joint=" · ")

    def prose(self, text: str, indent: int = 0, colour: str = "") -> list[str]:
        lines = wrap(printable_line(text).split(" "), self.width - indent)
        return [" " * indent + self.paint(line, colour) for line in lines]

    def timing(self, timing: Timing | None) -> list[str]:
        """Write the measured steps, numbers flush right, and below them what makes the difference and how
        they were taken.

        Where the parts of the steps do not fit beside the total, they follow as a sentence for each step.
        """
        if timing is None:
            return []
        lines = self.table(timing, timing.columns)
        sentences = [*timing.differences, *timing.notes]
        if lines and max(map(columns, lines)) > self.width:
            lines = self.table(timing, ())
            parts = (
                (row.label, zip(timing.columns, row.parts, strict=True)) for row in timing.rows if row.parts
            )
            sentences[:0] = [
                f"{label}: {', '.join(f'{name} {ms}' for name, ms in each if ms != '-')} ms."
                for label, each in parts
            ]
        told = [line for sentence in sentences for line in self.prose(sentence, 2)]
        return [
            self.paint(lines[0], DIM),
            *lines[1:],
            *told,
            *(self.paint(line, DIM) for line in self.prose(timing.basis, 2)),
        ]

    def table(self, timing: Timing, parts: tuple[str, ...]) -> list[str]:
        """Write the rows under their heads, with the parts of each step where they are asked for; a column
        that is empty is left out."""
        blank = ("",) * len(parts)
        heads = ["total" if parts else "", *parts, "GiB"]
        rows = [
            (
                printable_line(row.label),
                [row.step, *((row.parts or blank) if parts else ()), row.memory],
                row.note,
            )
            for row in timing.rows
        ]
        shown = [at for at in range(len(heads)) if at == 0 or any(cells[at] for _, cells, _ in rows)]
        names = ["ms a step", *(name for name, _, _ in rows)]
        widest = max(map(columns, names))
        widths = {at: max(map(columns, (heads[at], *(cells[at] for _, cells, _ in rows)))) for at in shown}
        lines = []
        for name, cells, note in (("ms a step", heads, ""), *rows):
            head = f"  {name}{' ' * (widest - columns(name) + 2)}"
            if note:
                first, *rest = self.prose(note, widest + 4)
                lines += [head + first.lstrip(), *rest]
            else:
                lines.append((head + "  ".join(cells[at].rjust(widths[at]) for at in shown)).rstrip())
        return lines

    def ledger(self, report: Document, screen: Screen) -> list[str]:
        """Write the GEMMs one by one, numbers flush right; where that is too wide, what it adds up to."""
        if report.ledger is None:
            return []
        found = ledger_table(report.ledger, screen.labels)
        numbers = [row for row in found.rows if len(row) > 1]
        widths = [max(map(columns, cells)) for cells in zip(*numbers, strict=True)]
        lines = []
        for row in found.rows:
            cells = (row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))
            lines.append(f"  {'  '.join(cells)}".rstrip())
        table = [self.paint(lines[0], DIM), *lines[1:]] if max(map(columns, lines)) <= self.width else []
        return table + [line for sentence in found.sentences for line in self.prose(sentence, 2)]

    def rates(self, report: Document, screen: Screen) -> list[str]:
        """Write what every variant reaches, and what none can."""
        if report.rates is None:
            return []
        told = rates_in_words(report.rates, bool(if_recorded(uses_fp8, report.facts)), screen.labels)
        return [line for sentence in told for line in self.prose(sentence, 2)]

    def mark(self, mark: Mark) -> str:
        return self.paint(f"[{self.glyphs[mark]}]", COLOURS[mark])

    def rows(self, lines: tuple[Line, ...]) -> list[str]:
        """Mark, name and hanging text in three columns; a name stands only on its first row, and before the
        text where it is too wide."""
        names = [printable_line(line.area) for line in lines]
        widest = max(map(columns, names), default=0)
        column = widest + 3 if widest else 0
        rows: list[str] = []
        for line, name, above in zip(lines, names, ("", *names), strict=False):
            mark = self.mark(line.mark) + " " * (self.margin - len(self.glyphs[line.mark]) - 2)
            shown = name if name != above else ""
            if column <= self.width // 3:
                first, *rest = self.prose(line.text, self.margin + column)
                mark += shown + " " * (column - columns(shown))
            else:
                first, *rest = self.prose(f"{shown} {line.text}", self.margin)
            rows += [mark + first.lstrip(), *rest]
        return rows

    def areas(self, lines: tuple[Line, ...]) -> list[str]:
        """Write the calm areas side by side."""
        plain = [f"[{self.glyphs[line.mark]}] {printable_line(line.area)}" for line in lines]
        text = "\n".join(wrap(plain, self.width, joint="  "))
        for mark in {line.mark for line in lines}:
            text = text.replace(f"[{self.glyphs[mark]}]", self.mark(mark))
        return text.split("\n") if text else []

    def outlook(self, text: str) -> list[str]:
        return [self.paint(line, BOLD) for line in self.prose(text)]

    def entry(self, entry: Entry) -> list[str]:
        number = str(entry.number) if entry.number else self.glyphs["not_applicable"]
        indent = max(3, len(number) + 2)
        name, *wide = wrap(
            [f"{entry.code} {printable_line(entry.name)}".lstrip(), printable_line(entry.aside)],
            self.width - indent,
            joint="     ",
        )
        lines = [
            self.paint(f"{number:<{indent}}{name}", BOLD if entry.number else ""),
            *(" " * indent + line for line in wide),
        ]
        lines += self.prose(entry.explanation, indent)
        if entry.treatment:
            lines += self.prose(f"{entry.label}: {entry.treatment}", indent)
        if entry.lines:
            lines += [(" " * (indent + 4) + line).rstrip() for line in printable_lines(entry.lines)]
        return lines

    def gaps(self, report: Document) -> list[str]:
        """List what could not be read or timed, with the reason."""
        gaps = report.facts.gaps if recorded(report.facts, "gaps") else {}
        told = [f"Not read: {name}: {reason}" for name, reason in gaps.items()]
        return [line for text in (*told, *not_timed(report.facts)) for line in self.prose(text)]

    def not_looked_at(self, screen: Screen) -> list[str]:
        told = (("Not looked at", screen.not_looked_at), ("Ignored", screen.ignored))
        return [line for label, text in told if text for line in self.prose(f"{label}: {text}")]

    def more(self, screen: Screen) -> list[str]:
        return self.prose(f"More: fp8doctor explain {screen.first_code}") if screen.first_code else []
