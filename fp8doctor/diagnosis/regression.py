"""Regression of a step against a saved report."""

from __future__ import annotations

from fp8doctor.analysis.arms import ratio_apart
from fp8doctor.analysis.timed_step import cpu_times, timed_step, unlike
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts


def checked_baseline(facts: Facts, name: str) -> Facts:
    """Return the facts of a baseline. Raises `UserError` where they hold no time."""
    step = timed_step(facts, name)
    if not step.step_ms:
        raise UserError(f"{name} is no baseline, it holds no time of a step: {step.missing}")
    return facts


def regression(baseline: Facts, facts: Facts, name: str, most_pct: float) -> str | None:
    """Say why a step misses the baseline saved as ``name``; None if it does not.

    It does not if it is at most ``most_pct`` longer, or if the difference is noise.
    """
    one, other = timed_step(baseline, name), timed_step(facts, "the step")
    if not one.step_ms or not other.step_ms:
        return f"no step was timed to compare with {name}: {other.missing}"
    if on_cpu := cpu_times(one, other):
        return on_cpu
    longer_pct = 100 * (other.step_ms / one.step_ms - 1)
    if other.step_ms - one.step_ms <= one.step_ms * most_pct / 100:
        return None
    if one.rounds_ms and other.rounds_ms and ratio_apart(one.rounds_ms, other.rounds_ms).high >= 1:
        return None
    things = ", ".join(what for what, *_ in unlike(baseline, facts))
    return (
        f"the step takes {other.step_ms:,.1f} ms, {longer_pct:.1f}% more than the {one.step_ms:,.1f} ms of "
        f"{name}{f', of which differ: {things}' if things else ''}"
    )
