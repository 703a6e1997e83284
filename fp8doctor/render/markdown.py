"""The report as Markdown, for issues, pull requests and notebooks."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from fp8doctor.diagnosis.document import Document
from fp8doctor.render import environment
from fp8doctor.render.marks import Line, Mark
from fp8doctor.render.screen import Entry, Screen, first_screen
from fp8doctor.render.terminal import printable_line, printable_lines
from fp8doctor.render.timing import Timing

GLYPHS: dict[Mark, str] = {
    "bad": "❌",
    "warning": "⚠️",
    "info": "ℹ️",
    "healthy": "✅",
    "not_applicable": "➖",
    "unknown": "❔",
}

SPECIAL = re.compile(r"([\\`*_{}\[\]|~#$!^])")
"""Characters with a meaning in GitHub's Markdown; ``<``, ``>`` and ``&`` become HTML entities."""

LINKED = re.compile(r"(?i)(?<=@)(?=[\w\[-])|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)")
"""Where an address, a mention, a reference or a mailbox would become a link. GitHub looks for them in what it
has rendered, so that no escape keeps it from it: a space of no width does."""

LIST_OR_HEADING = re.compile(r"^(\d{1,9})?([-+=.)])")
"""What begins a list or underlines a heading at the start of a line."""


def render(report: Document) -> str:
    """Write the report as Markdown. Nothing that came from a model or a machine is read as Markdown or
    HTML."""
    return "\n\n".join(_paragraphs(first_screen(report), report)) + "\n"


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


def _paragraphs(screen: Screen, report: Document) -> Iterator[str]:
    title, *versions = screen.machine
    yield f"## {escaped(title)}"
    yield _joined([*versions, screen.model])
    if environment.no_model(report):
        yield from _environment(report)
        return
    if screen.counts:
        yield _joined(screen.counts)
    yield f"**{escaped(screen.verdict) or 'No verdict.'}**"
    if screen.timing:
        yield _timing(screen.timing)
        for sentence in (*screen.timing.differences, *screen.timing.notes, screen.timing.basis):
            yield escaped(sentence)
    if screen.ranks:
        yield "\n".join(f"- {escaped(each.strip())}" for each in screen.ranks.lines)
    if screen.troubles:
        yield _table(screen.troubles)
    if screen.areas:
        yield _joined(f"{GLYPHS[line.mark]} {line.area}" for line in screen.areas)
    if screen.all_clear:
        yield screen.all_clear
    for entry in screen.prescription:
        yield from _entry(entry)
    if screen.folded:
        yield escaped(screen.folded)
    if screen.outlook:
        yield f"**{escaped(screen.outlook)}**"
    for entry in screen.others:
        yield from _entry(entry)
    if screen.made_up:
        yield escaped(screen.made_up)
    if screen.not_looked_at:
        yield f"Not looked at: {escaped(screen.not_looked_at)}"
    if screen.ignored:
        yield f"Ignored: {escaped(screen.ignored)}"
    if screen.first_code:
        yield f"More: {escaped(f'fp8doctor explain {screen.first_code}')}"
    if report.created_at:
        yield escaped(f"Recorded {report.created_at} by fp8doctor {report.tool.version}.")


def _joined(parts: Iterable[str]) -> str:
    return " · ".join(escaped(part) for part in parts if part)


def _table(lines: Iterable[Line]) -> str:
    from tabulate import tabulate

    rows = [(GLYPHS[line.mark], escaped(line.area), escaped(line.text)) for line in lines]
    return tabulate(rows, headers=("", "area", "found"), tablefmt="github", disable_numparse=True)


def _environment(report: Document) -> Iterator[str]:
    """Write whether the machine can train in FP8, what is there, and what to type."""
    mark, verdict = environment.says(report)
    yield f"{GLYPHS[mark]} **{escaped(verdict)}**"
    listed = list(environment.items(report))
    yield "\n".join(f"- {GLYPHS[each.mark]} {escaped(each.name)}: {escaped(each.text)}" for each in listed)
    yield from (fenced(each.lines) for each in listed if each.lines)


def _timing(timing: Timing) -> str:
    from tabulate import tabulate

    blank = ("",) * len(timing.columns)
    rows = [
        tuple(map(escaped, (row.label, row.step or row.note, *(row.parts or blank), row.memory)))
        for row in timing.rows
    ]
    headers = ("", "ms a step", *timing.columns, "GiB")
    return tabulate(
        rows,
        headers=headers,
        tablefmt="github",
        disable_numparse=True,
        colalign=("left", *("right",) * (len(headers) - 1)),
    )


def _entry(entry: Entry) -> Iterator[str]:
    number = f"{entry.number}. " if entry.number else ""
    yield f"### {number}{escaped(f'{entry.code} {entry.name}'.lstrip())}"
    if entry.aside:
        yield f"**{escaped(entry.aside)}**"
    if entry.explanation:
        yield escaped(entry.explanation)
    if entry.treatment:
        yield f"{entry.label}: {escaped(entry.treatment)}"
    if entry.lines:
        yield fenced(entry.lines)
