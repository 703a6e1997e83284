"""Findings to a plan: what to change, in which order, with symptoms left out whose cause is treated already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8doctor.finding import SEVERITIES, Finding, Saving, Treatment
from fp8doctor.record import Record


class Step(Record, frozen=True, kw_only=True):
    """One line of the prescription: a treatment and the findings that it mends."""

    code: str
    """The finding that ranks it, the worst it mends."""
    mends: tuple[str, ...]
    """Codes of all findings that share this treatment, ``code`` first."""
    title: str
    treatment: Treatment
    saving_ms: Saving | None = None
    """Of one step. Savings of several lines do not add up."""


def prescribe(findings: Iterable[Finding], explained_by: Mapping[str, tuple[str, ...]]) -> tuple[Step, ...]:
    """Rank the treatments of ``findings``: what makes FP8 impossible first, then by ms saved, then by severity.

    ``explained_by`` maps a code to the codes that cause it; a symptom whose cause was found too, as more than
    information, is dropped, and so is information that saves nothing. Findings that name the same treatment become one step.
    """
    findings = tuple(findings)
    found = {finding.code for finding in findings if finding.severity != "info"}
    steps: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.treatment is None or found.intersection(explained_by.get(finding.code, ())):
            continue
        if finding.severity == "info" and (finding.saving_ms is None or finding.saving_ms.high <= 0):
            continue
        steps.setdefault(finding.treatment.name, []).append(finding)
    return tuple(_step(sorted(group, key=_rank)) for group in sorted(steps.values(), key=lambda group: min(map(_rank, group))))


def _rank(finding: Finding) -> tuple[bool, float, int, str]:
    blocks_fp8 = finding.severity == "error"
    saved = finding.saving_ms.middle if finding.saving_ms else 0.0
    return not blocks_fp8, -saved, -SEVERITIES.index(finding.severity or "info"), finding.code


def _step(group: list[Finding]) -> Step:
    worst = group[0]
    assert worst.treatment is not None
    return Step(
        code=worst.code,
        mends=tuple(finding.code for finding in group),
        title=worst.title,
        treatment=worst.treatment,
        saving_ms=worst.saving_ms,
    )
