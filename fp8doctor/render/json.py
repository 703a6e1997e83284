"""The report as one JSON document, as ``report.schema.json`` describes it."""

from __future__ import annotations

from fp8doctor.report import Report


def render(report: Report) -> str:
    """The JSON document, the same bytes for the same report."""
    return report.to_json()
