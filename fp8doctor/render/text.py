"""The report as text: the first screen, and with ``-v`` the details below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fp8doctor.diagnosis.document import Document
from fp8doctor.render import environment_page
from fp8doctor.render.details import Details, Entry, details, without_findings
from fp8doctor.render.drawing import draw
from fp8doctor.render.environment_page import for_support, variables
from fp8doctor.render.screen import LONGEST_REASON, first_screen
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
from fp8doctor.render.timing import Timing
from fp8doctor.render.words import MARKS, Line, Mark

COLOURS: dict[Mark, str] = {
    "bad": "1;31",
    "warning": "1;33",
    "info": "36",
    "healthy": "32",
    "not_applicable": "2",
    "unknown": "35",
}

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
    """Write the report as text, at most ``width`` columns wide; code lines stay whole.

    ``verbose`` adds the details, ``quiet`` leaves the verdict, warnings and errors alone. ``held_in`` names
    the variable of Python that holds the report.
    """
    width = max(width, NARROWEST)
    page = _Page(width, _coloured if colour else _plain, {mark: MARKS[mark][ascii] for mark in MARKS})
    if environment_page.no_model(report):
        return _joined(page.environment(report, verbose=verbose, quiet=quiet), ascii)
    screen = first_screen(report, quiet=quiet, held_in=held_in)
    drawn = draw(screen, width=width, colour=colour, ascii=ascii)
    return f"{drawn}\n{_joined(page.details(details(report), report), ascii)}" if verbose else drawn


def _joined(paragraphs: Iterable[list[str]], ascii: bool) -> str:
    text = "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"
    return to_ascii(text) if ascii else text


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

    def details(self, found: Details, report: Document) -> Iterator[list[str]]:
        """Write what the first screen does not say."""
        yield self.joined(found.counts)
        yield self.parts(found.timing)
        for entry in found.entries:
            yield self.entry(entry)
        yield self.rows(found.outcomes)
        yield [line for each in found.gaps for line in self.prose(each)]
        yield self.joined((*for_support(report.facts), *variables(report.facts)))
        yield self.prose(f"Not looked at: {found.not_looked_at}" if found.not_looked_at else "")
        yield self.prose(found.recorded, colour=DIM)

    def environment(self, report: Document, *, verbose: bool, quiet: bool) -> Iterator[list[str]]:
        """Write whether the machine can train in FP8, and what is there, a line each."""
        mark, verdict = environment_page.says(report)
        first, *rest = self.prose(verdict, 2)
        yield [f"fp8doctor {report.tool.version}"]
        yield [f"{self.paint(self.glyphs[mark], COLOURS[mark])} {self.paint(first.lstrip(), BOLD)}", *rest]
        items = list(environment_page.items(report, quiet=quiet))
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
            yield [line for each in details(report).gaps for line in self.prose(each)]
        elif not quiet:
            yield self.prose(environment_page.ONLY)

    def joined(self, parts: Iterable[str]) -> list[str]:
        """Short parts side by side, broken between two of them."""
        return wrap(filter(None, map(printable_line, parts)), self.width, joint=" · ")

    def prose(self, text: str, indent: int = 0, colour: str = "") -> list[str]:
        lines = wrap(printable_line(text).split(" "), self.width - indent)
        return [" " * indent + self.paint(line, colour) for line in lines]

    def parts(self, timing: Timing | None) -> list[str]:
        """Write the parts of each step as a table; if it is too wide, as sentences."""
        if timing is None:
            return []
        named = [(printable_line(row.label), row.parts) for row in timing.rows if row.parts]
        rows = [("ms/step", timing.columns), *named]
        widths = [max(map(columns, cells)) for cells in zip(*(cells for _, cells in rows), strict=True)]
        widest = max(columns(name) for name, _ in rows)
        lines = [
            f"  {name}{' ' * (widest - columns(name) + 2)}{'  '.join(map(str.rjust, cells, widths))}".rstrip()
            for name, cells in rows
        ]
        sentences: list[str] = []
        if max(map(columns, lines)) > self.width:
            lines = []
            for label, cells in named:
                pairs = zip(timing.columns, cells, strict=True)
                told = ", ".join(f"{name} {ms}" for name, ms in pairs if ms != "-")
                sentences.append(f"{label}: {told} ms.")
        table = [self.paint(lines[0], DIM), *lines[1:]] if named and lines else []
        sentences += (*timing.differences[1:], *timing.notes)
        sentences += [f"{row.label}: {row.note}." for row in timing.rows if len(row.reason) > LONGEST_REASON]
        told_lines = [line for sentence in sentences for line in self.prose(sentence, 2)]
        return [*table, *told_lines]

    def rows(self, lines: tuple[Line, ...]) -> list[str]:
        """Write a mark and hanging text for each line."""
        rows: list[str] = []
        for line in lines:
            glyph = self.glyphs[line.mark]
            mark = self.paint(f"[{glyph}]", COLOURS[line.mark]) + " " * (self.margin - len(glyph) - 2)
            first, *rest = self.prose(line.text, self.margin)
            rows += [mark + first.lstrip(), *rest]
        return rows

    def entry(self, entry: Entry) -> list[str]:
        """Explain a finding; the first screen has the lines of a fix that is numbered."""
        name, *wide = wrap(
            [f"{entry.code} {printable_line(entry.name)}".lstrip(), printable_line(entry.aside)],
            self.width - 3,
            joint="     ",
        )
        number = f"{entry.number or self.glyphs['not_applicable']}"
        lines = [self.paint(f"{number:<3}{name}", BOLD if entry.number else "")]
        lines += [f"   {line}" for line in wide]
        lines += self.prose(entry.explanation, 3)
        if entry.treatment and not entry.number:
            lines += self.prose(f"{entry.label}: {entry.treatment}", 3)
            code = printable_lines(entry.lines) if entry.lines else []
            lines += [f"       {line}".rstrip() for line in code]
        return lines
