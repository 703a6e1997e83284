"""What a saved report can say of a trial, and no trial ever does: it was written by hand, or damaged."""

from __future__ import annotations

from fp8doctor.facts import Arm, Facts, recorded


def contradiction(facts: Facts) -> str | None:
    """Which arm was timed and has no time, in a sentence; None where each has one."""
    for arm in facts.arms():
        if recorded(arm, "tried") and arm.tried and (lacks := _lacks(arm)):
            name = repr(arm.name) if recorded(arm, "name") else "an arm"
            return f"it says that {name} was timed, and has no {lacks}"
    return None


def _lacks(arm: Arm) -> str | None:
    """The part that an arm that was timed has in every trial, and this one has not."""
    if recorded(arm, "step_ms") and not (arm.step_ms and arm.step_ms > 0):
        return "step_ms above 0"
    if recorded(arm, "rounds_ms") and not (arm.rounds_ms and min(arm.rounds_ms) > 0):
        return "rounds_ms above 0"
    return "cuts" if recorded(arm, "cuts") and not arm.cuts else None
