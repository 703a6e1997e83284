"""The report as JUnit's XML: the verdict and every check as a test case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8doctor import registry
from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.diagnosis.document import Document
from fp8doctor.finding import Outcome
from fp8doctor.render.notices import Notice, file_of, notices
from fp8doctor.render.terminal import printable_line

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

NOT_TIMED = ("not_measured", "too_noisy")
"""Verdicts that are no answer."""

COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
"""Attribute of a suite -> the elements that it counts."""


def render(report: Document, *, fail_on: Severity | None = "error", file: str = "") -> str:
    """Write the test cases.

    A finding at or above ``fail_on`` is a failure, any other is told in the output of its case; a check that
    could not answer, or whose question does not arise, is skipped with the reason.
    """
    from xml.etree.ElementTree import Element, SubElement, indent, tostring

    verdict, *found = notices(report)
    by_code = {notice.code: notice for notice in found}
    names = {check.code: check.name for check in registry.discover()}
    suite = Element("testsuite", name=f"fp8doctor {file or file_of(report)}".rstrip())
    if report.created_at:
        suite.set("timestamp", printable_line(report.created_at))
    case = SubElement(suite, "testcase", classname="fp8doctor", name="verdict")
    if not _fails(case, verdict, fail_on if report.verdict_severity() else None):
        if verdict.name in NOT_TIMED:
            SubElement(case, "skipped", message=verdict.title)
        else:
            SubElement(case, "system-out").text = verdict.title
    for outcome in report.outcomes:
        notice = by_code.get(outcome.code)
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


def _fails(case: Element, notice: Notice, fail_on: Severity | None) -> bool:
    """Add the failure, where it is one."""
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
