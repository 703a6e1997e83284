"""The report as SARIF 2.1.0: the checks as rules with their manual pages, what was found as results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8doctor import registry
from fp8doctor.areas import Severity
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts.record import encode
from fp8doctor.render.notices import VERDICT, Notice, file_of, notices
from fp8doctor.render.terminal import printable_line

LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

ABOUT_THE_VERDICT = "Whether FP8 runs, and whether it is faster than the best BF16 of the same model."


def render(report: Document, *, file: str = "") -> str:
    """Write the document. Results are located in ``file``, else in the one that the report names."""
    place = file or file_of(report)
    rules = list(_rules(report))
    at = {rule["id"]: index for index, rule in enumerate(rules)}
    results = [_result(notice, at[notice.code], place) for notice in notices(report) if _counts(notice)]
    run = {
        "tool": {
            "driver": {
                "name": report.tool.name,
                "version": printable_line(report.tool.version),
                "rules": rules,
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return encode({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}).decode()


def _counts(notice: Notice) -> bool:
    """Whether it is a result; a verdict that nothing is wrong with is none."""
    return notice.code != VERDICT or notice.severity != "info"


def _rules(report: Document) -> Iterator[dict[str, Any]]:
    """The rules: the verdict, and every check that was selected or found something."""
    yield {
        "id": VERDICT,
        "name": "verdict",
        "shortDescription": {"text": ABOUT_THE_VERDICT},
        "help": {"text": ABOUT_THE_VERDICT},
        "defaultConfiguration": {"level": "error"},
    }
    known = {check.code: check for check in registry.discover()}
    found = {finding.code: finding for finding in report.findings}
    for code in dict.fromkeys((*(outcome.code for outcome in report.outcomes), *found)):
        if code in known:
            check = known[code]
            name, title, page, severity = check.name, check.title, check.page, check.severity
        else:
            finding = found.get(code)
            name = printable_line(finding.name) if finding else code
            title = page = printable_line(finding.title) if finding else code
            severity = (finding.severity if finding else None) or "info"
        yield {
            "id": code,
            "name": name,
            "shortDescription": {"text": title or code},
            "help": {"text": page or title or code},
            "defaultConfiguration": {"level": LEVELS[severity]},
        }


def _result(notice: Notice, rule: int, file: str) -> dict[str, Any]:
    from urllib.parse import quote

    result: dict[str, Any] = {
        "ruleId": notice.code,
        "ruleIndex": rule,
        "level": LEVELS[notice.severity],
        "message": {"text": "\n".join(filter(None, (notice.title, notice.text)))},
        "partialFingerprints": {"fp8doctor/v1": notice.code},
    }
    if file:
        place = {"artifactLocation": {"uri": quote(file)}, "region": {"startLine": 1}}
        result["locations"] = [{"physicalLocation": place}]
    return result
