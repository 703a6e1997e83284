"""The report for build servers: GitHub annotations and JUnit XML."""

from collections.abc import Iterator

from msgspec import Struct

from fp8doctor import registry
from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.diagnosis.document import Document
from fp8doctor.render.terminal import printable_line, printable_lines


class Notice(Struct, frozen=True):
    """The verdict or one finding, harmless to print."""

    code: str
    name: str
    severity: Severity | None
    """Of a verdict that is no problem None."""
    title: str
    """One line."""
    text: str = ""
    """Lines: what was seen, and what to do about it."""


def notices(report: Document) -> Iterator[Notice]:
    explained = {each.name: each for each in report.answer.items} if report.answer else {}
    told = report.verdict
    title = printable_line(told.summary) or "No verdict."
    yield Notice("VERDICT", told.status, report.verdict_severity(), title)
    for finding in report.findings:
        lines = [printable_line(finding.explanation)]
        if item := explained.get(finding.name):
            lines.append(printable_line(item.aside))
            if item.summary:
                fix = "Fix" if item.number else "Would change it"
                lines += [f"{fix}: {printable_line(item.summary)}", *printable_lines(item.lines)]
        name, title = printable_line(finding.name), printable_line(finding.title)
        yield Notice(finding.code, name, finding.severity or "info", title, "\n".join(filter(None, lines)))


def file_of(report: Document) -> str:
    """Name the file that was looked at; empty if it was none."""
    is_file = report.facts.get("target.kind") in ("file", "script")
    return printable_line(report.facts.get("target.name", "")) if is_file else ""


COMMANDS: dict[Severity | None, str] = {"error": "error", "warning": "warning"}

DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
"""Characters that end a command, and their escapes. Source: actions/toolkit, core/src/command.ts."""

PROPERTY = DATA | str.maketrans({":": "%3A", ",": "%2C"})
"""Characters that end the value of a property too."""


def github(report: Document, *, file: str = "") -> str:
    """Write the annotations, one per line, for ``file`` or the report's file."""
    place = file or file_of(report)
    where = f"file={place.translate(PROPERTY)},line=1," if place else ""
    lines = []
    for notice in notices(report):
        title = f"{notice.code} {notice.name}".translate(PROPERTY)
        message = "\n".join(filter(None, (notice.title, notice.text))).translate(DATA)
        lines.append(f"::{COMMANDS.get(notice.severity, 'notice')} {where}title={title}::{message}\n")
    return "".join(lines)


COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
"""Attribute of a suite -> the elements that it counts."""

TAGS = {
    "unknown": ("skipped", "unknown: "),
    "not_applicable": ("skipped", "does not apply: "),
    "crashed": ("error", ""),
}
"""Outcome of a check without an answer -> the element that says so, and its words."""


def junit(report: Document, *, fail_on: Severity | None = "error", file: str = "") -> str:
    """Write the test cases.

    A finding at or above ``fail_on`` is a failure, any other is in the output of its case; a check that
    could not answer, or whose question does not arise, is skipped with the reason.
    """
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    suites = Element("testsuites", name="fp8doctor")
    suite = SubElement(suites, "testsuite", name=f"fp8doctor {file or file_of(report)}".rstrip())
    if report.created_at:
        suite.set("timestamp", printable_line(report.created_at))
    fails = SEVERITIES[SEVERITIES.index(fail_on) :] if fail_on else ()

    def add(of: str, name: str, tag: str, text: str = "", **attributes: str) -> None:
        case = SubElement(suite, "testcase", classname=of, name=name.rstrip())
        if tag:
            SubElement(case, tag, attributes).text = text or None

    def tell(of: str, name: str, notice: Notice) -> None:
        if notice.severity in fails:
            text = notice.text or notice.title
            add(of, name, "failure", text, message=notice.title, type=str(notice.severity))
        elif notice.name == "open":
            add(of, name, "skipped", message=notice.title)
        else:
            add(of, name, "system-out", f"{notice.title}\n{notice.text}".rstrip())

    verdict, *found = notices(report)
    tell("fp8doctor", "verdict", verdict)
    names = {check.code: check.name for check in reversed(registry.discover())}
    for outcome in report.outcomes:
        of, code = f"fp8doctor.{outcome.area}", outcome.code
        of_check = [each for each in found if each.code == code]
        for notice in of_check:
            tell(of, f"{code} {notice.name}", notice)
        if not of_check:
            name, reason = f"{code} {names.get(code, '')}", printable_line(outcome.reason or "")
            if outcome.outcome in TAGS:
                tag, words = TAGS[outcome.outcome]
                add(of, name, tag, message=f"{words}{reason or 'no reason given'}")
            else:
                add(of, name, "system-out" if reason else "", f"{outcome.outcome}: {reason}")
    for element in (suites, suite):
        for count, tag in COUNTS.items():
            element.set(count, str(len(list(suite.iter(tag)))))
    indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(suites, encoding="unicode")}\n'
