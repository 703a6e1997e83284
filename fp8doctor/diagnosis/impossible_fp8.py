"""On a GPU that has no FP8, what FP8 does there is no finding."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor import registry
from fp8doctor.facts import recorded
from fp8doctor.finding import Finding, Outcome

CAUSE = "GPU001"
LEARNS = "layers_do_not_learn"
"""Codes that hold in BF16 too."""


def without_its_symptoms(
    findings: Sequence[Finding], outcomes: Sequence[Outcome]
) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Drop findings about FP8 if the GPU, or all of them, make an FP8 step raise."""
    if not any(each.code == CAUSE and recorded(each, "breaks") for each in findings):
        return tuple(findings), tuple(outcomes)
    of_fp8 = {check.code for check in registry.discover() if check.changes_fp8}
    dropped = {each.code for each in findings if each.code in of_fp8 and each.get("breaks") != LEARNS}
    reason = f"no FP8 step runs on this GPU ({CAUSE})"
    return (
        tuple(
            msgspec.structs.replace(
                each, caused_by=tuple(code for code in each.caused_by if code not in dropped)
            )
            for each in findings
            if each.code not in dropped
        ),
        tuple(
            msgspec.structs.replace(each, outcome="not_applicable", reason=reason)
            if each.code in dropped
            else each
            for each in outcomes
        ),
    )
