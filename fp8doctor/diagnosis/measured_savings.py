"""Savings that the trial measured; a finding that saves nothing is refuted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor.analysis.arms import saved_ms
from fp8doctor.analysis.significance import Interval
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import if_recorded
from fp8doctor.finding import Finding, Outcome


def with_measured_savings(
    view: TrialView, findings: Sequence[Finding], outcomes: Sequence[Outcome]
) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Return the findings with savings that a GPU measured, refuted ones marked.

    A variant must have carried out the treatment alone. A refuted finding keeps its saving, zero or negative,
    and becomes information. If the treatment needs too much memory, its finding stays and says so.
    """
    if not view.on_gpu:
        return tuple(findings), tuple(outcomes)
    weighed, refuted = [], {}
    for finding in (_without_too_large(view, each) for each in findings):
        saved = if_recorded(_saved_alone, view, finding)
        if saved is not None:
            finding = msgspec.structs.replace(finding, saving_ms=view.saving(saved))
            if saved.high <= 0:
                finding = msgspec.structs.replace(finding, severity="info")
                refuted[finding.code] = (
                    f"measured: {finding.treatment.name if finding.treatment else ''} costs "
                    f"{-saved.median:,.1f} ms/step instead of saving"
                )
        weighed.append(finding)
    judged = tuple(
        msgspec.structs.replace(outcome, outcome="refuted", reason=refuted[outcome.code])
        if outcome.code in refuted
        else outcome
        for outcome in outcomes
    )
    return tuple(weighed), judged


def _without_too_large(view: TrialView, finding: Finding) -> Finding:
    treatment = finding.treatment
    found = view.too_large.get((treatment.name,)) if treatment else None
    if treatment is None or found is None:
        return finding
    why = f"A fix for it, {treatment.summary}, is not in the plan: {found.reason}."
    return msgspec.structs.replace(
        finding, explanation=f"{finding.explanation} {why}", treatment=None, saving_ms=None
    )


def _saved_alone(view: TrialView, finding: Finding) -> Interval | None:
    """Return a finding's saving as timed with only its treatment; else None.

    A finding of a measured check brings its own. BF16 is compared with the best FP8: the rest of its saving
    is the other treatments' gain.
    """
    if finding.treatment is None or (finding.saving_ms is not None and finding.saving_ms.basis == "measured"):
        return None
    if finding.treatment.name == STAY_IN_BF16:
        fp8 = view.fp8 if view.uses_fp8 else None
        return saved_ms(fp8, view.bf16) if fp8 and view.bf16 else None
    return view.savings.get(finding.treatment.name)
