"""Why a variant or a trial has no number, and a trial that lost a part."""

import re
from typing import Any

import msgspec

from fp8doctor.facts import Arm, Trial, recorded
from fp8doctor.facts.arm_names import Reason

BREAKDOWN = "breakdown"
"""The profiles, as progress and ``skip`` call them: if a process dies in one, the next runs without."""

USED_UP = re.compile(r"the budget of ([\d.]+) s ")
"""How a sentence of recordings without `Arm.why` begins, for a variant that was left out for time."""


class NoNumber(msgspec.Struct, frozen=True):
    """Why there is no number: a kind for code, and a sentence for people."""

    why: Reason
    sentence: str


def why_of(part: Arm | Trial) -> Reason | None:
    """Return why a variant or a trial has no number; None if it has one, or unknown."""
    if recorded(part, "why"):
        return part.why
    return Reason.NO_TIME_LEFT if USED_UP.match(part.get("reason") or "") else None


def did_not_fit(budget_s: float) -> str:
    """Write the reason of a variant that was left out for time."""
    return f"it did not fit into the budget of {budget_s:g} s"


def sentence_of(part: Arm) -> str | None:
    """Return why a variant has no number, in a sentence for people."""
    sentence = part.get("reason")
    budget = USED_UP.match(sentence or "")
    return did_not_fit(float(budget[1])) if budget else sentence


def without(trial: Trial, part: str, no_number: NoNumber) -> Trial:
    """Return the trial with the reason why a variant without a time, or its `BREAKDOWN`, is missing."""
    if part == BREAKDOWN:
        gaps = {**trial.get("gaps", {}), "trial.arms.breakdown": no_number.sentence}
        return msgspec.structs.replace(trial, gaps=gaps)
    arms = (
        msgspec.structs.replace(arm, why=no_number.why, reason=no_number.sentence)
        if arm.name == part and not arm.tried
        else arm
        for arm in trial.arms
    )
    return msgspec.structs.replace(trial, arms=tuple(arms))


def not_tried(no_number: NoNumber | None, **plan: Any) -> Arm:
    """Make the record of a planned variant without a number."""
    why, reason = (no_number.why, no_number.sentence) if no_number else (None, None)
    return Arm(**plan, tried=False, why=why, reason=reason, breakdown=None, memory=None, non_finite=None)
