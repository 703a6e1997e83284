"""The report as Markdown, for issues, pull requests and notebooks."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from fp8doctor.answer.sentences import Box, Tone
from fp8doctor.diagnosis.document import Document
from fp8doctor.render import environment_page
from fp8doctor.render.details import Details, Entry, details
from fp8doctor.render.planned_fixes import Fix
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.terminal import printable_line, printable_lines
from fp8doctor.render.timing import Row
from fp8doctor.render.words import Mark

GLYPHS: dict[Mark, str] = {
    "bad": "❌",
    "warning": "⚠️",
    "info": "ℹ️",
    "healthy": "✅",
    "not_applicable": "➖",
    "unknown": "❔",
}

TONES: dict[Tone, Mark] = {"bad": "bad", "good": "healthy", "plain": "warning"}
"""Tone of an answer -> its mark."""

SPECIAL = re.compile(r"([\\`*_{}\[\]|~#$!^])")
"""Characters with a meaning in GitHub's Markdown; ``<``, ``>`` and ``&`` become HTML entities."""

LINKED = re.compile(r"(?i)(?<=@)(?=[\w\[-])|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)")
"""Where an address, a mention, a reference or a mailbox would become a link. GitHub looks for them in what it
has rendered, so that no escape keeps it from it: a space of no width does."""

LIST_OR_HEADING = re.compile(r"^(\d{1,9})?([-+=.)])")
"""Start of a list item, or a line that makes the one above a heading."""


def render(report: Document) -> str:
    """Write the report as Markdown; nothing from a model or machine is read as markup."""
    if environment_page.no_model(report):
        return "\n\n".join(_environment(report)) + "\n"
    return "\n\n".join(_paragraphs(first_screen(report), details(report))) + "\n"


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


def _paragraphs(screen: Screen, more: Details) -> Iterator[str]:
    """Write the first screen, and the details where a reader opens them."""
    yield f"## {_joined(screen.job)}"
    yield _joined(screen.machine)
    yield from _answer(screen.box)
    for fix in screen.fixes:
        yield from _fix(fix)
    if screen.facts:
        yield "\n".join(f"- {label}: {escaped(told)}" for label, told in screen.facts)
    yield from _steps(screen, more)
    if screen.ranks:
        yield "\n".join(f"- {escaped(each.strip())}" for each in screen.ranks.lines)
    beside = [f"- {GLYPHS[each.mark]} {escaped(_with_code(each.text, each.code))}" for each in screen.notices]
    beside += [f"- {GLYPHS['info']} {escaped(screen.notes)}"] if screen.notes else []
    if beside:
        yield "\n".join(beside)
    if screen.areas:
        yield " · ".join(f"{GLYPHS[mark]} {escaped(text)}" for mark, text in screen.areas)
    if screen.made_up:
        yield escaped(screen.made_up)
    if screen.ignored:
        yield f"Ignored: {escaped(screen.ignored)}"
    yield "<details><summary>Details</summary>"
    yield from _details(more)
    yield "</details>"


def _joined(parts: Iterable[str]) -> str:
    return " · ".join(escaped(part) for part in parts if part)


def _with_code(text: str, code: str) -> str:
    return text if code in text else f"{text} ({code})"


def _answer(said: Box) -> Iterator[str]:
    """Write the box: the verdict, and a row for each question."""
    yield f"**{GLYPHS[TONES[said.tone]]} {escaped(said.headline)}**"
    rows = [(f"**{row.label}**", "<br>".join(escaped(line.text) for line in row.lines)) for row in said.rows]
    yield table(("", ""), rows)


def _steps(screen: Screen, more: Details) -> Iterator[str]:
    """Write the variants with their parts in numbers, and what makes the difference."""
    timing = more.timing
    if timing is None:
        return
    speeds = {each.label: each.speed for each in screen.variants}
    if rows := [_cells(row, speeds.get(row.label, ""), timing.columns) for row in timing.rows if row.arm]:
        heads = ("", "ms/step", "speed", *timing.columns, "GiB")
        yield table(heads, [tuple(map(escaped, cells)) for cells in rows], numbers=len(heads) - 1)
    told = (screen.method, screen.untimed, *timing.differences[:1])
    yield from (escaped(each) for each in told if each)


def _cells(row: Row, speed: str, parts: Sequence[str]) -> tuple[str, ...]:
    return (row.label, row.step, speed, *(row.parts or ("",) * len(parts)), row.memory)


def _fix(fix: Fix) -> Iterator[str]:
    code = f" ({fix.code})" if fix.code else ""
    yield f"### Fix {fix.number}: {escaped(f'{fix.summary}{code}')}"
    if fix.aside:
        yield escaped(f"{fix.aside[:1].upper()}{fix.aside[1:]}.")
    if fix.lines:
        yield fenced(fix.lines)


def _details(more: Details) -> Iterator[str]:
    yield _joined(more.counts)
    for entry in more.entries:
        yield from _entry(entry)
    if timing := more.timing:
        yield from (escaped(each) for each in (*timing.differences[1:], *timing.notes) if each)
    if more.not_looked_at:
        yield f"Not looked at: {escaped(more.not_looked_at)}"
    if more.recorded:
        yield escaped(more.recorded)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0, texts: int = 0) -> str:
    """Lay out escaped cells; ``numbers`` columns before the last ``texts`` end flush."""
    from tabulate import tabulate

    return tabulate(
        rows,
        headers=heads,
        tablefmt="github",
        disable_numparse=True,
        colalign=(
            *("left",) * (len(heads) - numbers - texts),
            *("right",) * numbers,
            *("left",) * texts,
        ),
    )


def _entry(entry: Entry) -> Iterator[str]:
    """Explain a finding; the lines of a fix that is numbered stand above."""
    aside = f": {entry.aside}" if entry.aside and not entry.number else ""
    yield f"**{escaped(f'{entry.code} {entry.name}{aside}'.lstrip())}**"
    if entry.explanation:
        yield escaped(entry.explanation)
    if entry.treatment and not entry.number:
        yield f"{entry.label}: {escaped(entry.treatment)}"
        if entry.lines:
            yield fenced(entry.lines)


def _environment(report: Document) -> Iterator[str]:
    """Write whether the machine can train in FP8, what is there, and what to type."""
    mark, verdict = environment_page.says(report)
    yield f"## {escaped(f'fp8doctor {report.tool.version}')}"
    yield f"{GLYPHS[mark]} **{escaped(verdict)}**"
    listed = list(environment_page.items(report))
    rows = [(GLYPHS[each.mark], escaped(each.name), escaped(each.text)) for each in listed]
    yield table(("", "", "found"), rows)
    yield from (fenced(each.lines) for each in listed if each.lines)
    yield environment_page.ONLY
