"""The report for build servers: GitHub annotations and JUnit XML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from fp8doctor import registry
from fp8doctor.answer.items import Item
from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import recorded
from fp8doctor.finding import Outcome
from fp8doctor.render.terminal import printable_line, printable_lines

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

VERDICT = "VERDICT"
"""Stands where a finding has its code."""


class Annotation(Struct, frozen=True):
    """The verdict or one finding, harmless to print."""

    code: str
    name: str
    severity: Severity
    title: str
    """One line."""
    text: str
    """Lines: what was seen, and what to do about it. Empty if the title says it all."""


def notices(report: Document) -> tuple[Annotation, ...]:
    """Put a report into notices, the verdict first."""
    explained = {each.name: each for each in report.answer.items} if report.answer else {}
    told = report.verdict
    verdict = Annotation(
        VERDICT,
        told.status,
        report.verdict_severity() or "info",
        printable_line(told.summary) or "No verdict.",
        "",
    )
    return (
        verdict,
        *(
            Annotation(
                finding.code,
                printable_line(finding.name),
                finding.severity or "info",
                printable_line(finding.title),
                _text(explained.get(finding.name), finding.explanation),
            )
            for finding in report.findings
        ),
    )


def _text(item: Item | None, explanation: str) -> str:
    lines = [printable_line(explanation)]
    if item is not None:
        lines += [printable_line(item.aside)]
        fix = "Fix" if item.number else "Would change it"
        lines += (
            [f"{fix}: {printable_line(item.summary)}", *printable_lines(item.lines)] if item.summary else []
        )
    return "\n".join(line for line in lines if line)


def file_of(report: Document) -> str:
    """Name the file that was looked at; empty if it was none."""
    facts = report.facts
    if not recorded(facts, "target.kind") or not recorded(facts, "target.name"):
        return ""
    return printable_line(facts.target.name) if facts.target.kind in ("file", "script") else ""


COMMANDS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}

DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
"""Characters that end a command, and their escapes. Source: actions/toolkit, core/src/command.ts."""

PROPERTY = {**DATA, ":": "%3A", ",": "%2C"}
"""Characters that end the value of a property too."""


def github(report: Document, *, file: str = "") -> str:
    """Write the annotations, one per line, for ``file`` or the report's file."""
    place = file or file_of(report)
    return "".join(f"{_annotation(notice, place)}\n" for notice in notices(report))


def _annotation(notice: Annotation, file: str) -> str:
    properties = {"file": file, "line": "1"} if file else {}
    properties["title"] = f"{notice.code} {notice.name}"
    named = ",".join(f"{name}={_escaped(value, PROPERTY)}" for name, value in properties.items())
    message = "\n".join(filter(None, (notice.title, notice.text)))
    return f"::{COMMANDS[notice.severity]} {named}::{_escaped(message, DATA)}"


def _escaped(text: str, marks: dict[str, str]) -> str:
    return "".join(marks.get(each, each) for each in text)


COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
"""Attribute of a suite -> the elements that it counts."""


def junit(report: Document, *, fail_on: Severity | None = "error", file: str = "") -> str:
    """Write the test cases.

    A finding at or above ``fail_on`` is a failure, any other is in the output of its case; a check that
    could not answer, or whose question does not arise, is skipped with the reason.
    """
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    verdict, *found = notices(report)
    names = {check.code: check.name for check in reversed(registry.discover())}
    suite = Element("testsuite", name=f"fp8doctor {file or file_of(report)}".rstrip())
    if report.created_at:
        suite.set("timestamp", printable_line(report.created_at))
    case = SubElement(suite, "testcase", classname="fp8doctor", name="verdict")
    if not _fails(case, verdict, fail_on if report.verdict_severity() else None):
        if verdict.name == "open":
            SubElement(case, "skipped", message=verdict.title)
        else:
            SubElement(case, "system-out").text = verdict.title
    cases: list[tuple[Outcome, Annotation | None]] = []
    for outcome in report.outcomes:
        cases += [(outcome, each) for each in found if each.code == outcome.code] or [(outcome, None)]
    for outcome, notice in cases:
        name = f"{outcome.code} {notice.name if notice else names.get(outcome.code, '')}".rstrip()
        case = SubElement(suite, "testcase", classname=f"fp8doctor.{outcome.area}", name=name)
        if notice is None:
            _without_finding(case, outcome)
        elif not _fails(case, notice, fail_on):
            SubElement(case, "system-out").text = f"{notice.severity}: {notice.title}\n{notice.text}"
    suites = Element("testsuites", name="fp8doctor")
    suites.append(suite)
    for element in (suites, suite):
        for count, tag in COUNTS.items():
            element.set(count, str(len(list(suite.iter(tag)))))
    indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(suites, encoding="unicode")}\n'


def _fails(case: Element, notice: Annotation, fail_on: Severity | None) -> bool:
    """Add the failure, if it is one."""
    from xml.etree.ElementTree import SubElement

    if fail_on is None or SEVERITIES.index(notice.severity) < SEVERITIES.index(fail_on):
        return False
    SubElement(case, "failure", message=notice.title, type=notice.severity).text = notice.text or notice.title
    return True


def _without_finding(case: Element, outcome: Outcome) -> None:
    from xml.etree.ElementTree import SubElement

    reason = printable_line(outcome.reason or "no reason given")
    if outcome.outcome == "unknown":
        SubElement(case, "skipped", message=f"unknown: {reason}")
    elif outcome.outcome == "not_applicable":
        SubElement(case, "skipped", message=f"does not apply: {reason}")
    elif outcome.outcome == "crashed":
        SubElement(case, "error", message=reason, type="crashed")
    elif outcome.reason:
        SubElement(case, "system-out").text = f"{outcome.outcome}: {reason}"
