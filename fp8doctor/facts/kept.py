"""What is kept of a trial whose times were known when a later part of it took the process or its GPU down."""

from __future__ import annotations

import msgspec

from fp8doctor.facts import Arm, Trial, recorded
from fp8doctor.facts.arm_names import COMBINATION

PARTS = {"breakdown": "trial.arms.breakdown", "numerics": "trial.numerics"}
"""Parts that are no arms, as progress and ``skip`` call them -> the facts that are missing without them."""


def without(trial: Trial, part: str, reason: str) -> Trial:
    """The trial with the reason why ``part``, an arm or one of `PARTS`, is missing; an arm that was timed
    failed in a second window."""
    if part in PARTS:
        gaps = dict(trial.gaps) if recorded(trial, "gaps") else {}
        return msgspec.structs.replace(trial, gaps={**gaps, PARTS[part]: reason})
    if any(arm.name == part and not arm.tried for arm in trial.arms):
        arms = (
            msgspec.structs.replace(arm, reason=reason) if arm.name == part else arm for arm in trial.arms
        )
        return msgspec.structs.replace(trial, arms=tuple(arms))
    failed = Arm(
        name=COMBINATION,
        treatments=(),
        base=None,
        tried=False,
        reason=reason,
        breakdown=None,
        memory=None,
        non_finite=None,
    )
    return msgspec.structs.replace(trial, arms=(*trial.arms, failed))
