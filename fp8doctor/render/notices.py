"""What a report has to say, one notice each, as the tools of a build server want it: the verdict, then the
findings."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.areas import Severity
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import recorded
from fp8doctor.render.screen import Entry, first_screen
from fp8doctor.render.terminal import printable_line, printable_lines

VERDICT = "VERDICT"
"""Stands where a finding has its code."""


class Notice(Struct, frozen=True):
    """The verdict or one finding, harmless to print."""

    code: str
    name: str
    severity: Severity
    title: str
    """One line."""
    text: str
    """Lines: what was seen, and what to do about it. Empty where the title says it all."""


def notices(report: Document) -> tuple[Notice, ...]:
    """Put a report into notices, the verdict first."""
    screen = first_screen(report, whole=True)
    entries = {entry.code: entry for entry in (*screen.prescription, *screen.others)}
    told = report.verdict
    verdict = Notice(
        VERDICT,
        told.status,
        report.verdict_severity() or "info",
        printable_line(told.summary) or "No verdict.",
        "",
    )
    return (
        verdict,
        *(
            Notice(
                finding.code,
                printable_line(finding.name),
                finding.severity or "info",
                printable_line(finding.title),
                _text(entries.get(finding.code), finding.explanation),
            )
            for finding in report.findings
        ),
    )


def _text(entry: Entry | None, explanation: str) -> str:
    lines = [printable_line(explanation)]
    if entry is not None and entry.aside:
        lines.append(printable_line(entry.aside))
    if entry is not None and entry.treatment:
        lines += [f"{entry.label}: {printable_line(entry.treatment)}", *printable_lines(entry.lines)]
    return "\n".join(line for line in lines if line)


def file_of(report: Document) -> str:
    """Name the file that was looked at; empty where it was none."""
    facts = report.facts
    if not recorded(facts, "target.kind") or not recorded(facts, "target.name"):
        return ""
    return printable_line(facts.target.name) if facts.target.kind in ("file", "script") else ""
