"""Open questions of a report that could change its verdict."""

from __future__ import annotations

from collections.abc import Iterable

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Outcome
from fp8doctor.wording import plural


def may_raise(outcomes: Iterable[Outcome], verdict: Verdict, facts: Facts) -> list[str]:
    """Say what checks that could predict an exception do not know.

    Nothing if the step ran on a GPU, raises anyway, or belongs to no model.
    """
    if not recorded(facts, "network") or verdict.status == "step_raises" or if_recorded(ran_on_a_gpu, facts):
        return []
    raising = {check.code for check in registry.discover() if check.may_raise}
    return [
        f"whether the step raises on a GPU: {_reason(each, facts)} ({each.code})"
        for each in outcomes
        if each.code in raising and each.outcome == "unknown" and not _waits_for_trial(each)
    ]


def open_questions(outcomes: Iterable[Outcome], verdict: Verdict, facts: Facts) -> list[str]:
    """List possible exceptions, other errors that no check could rule out, and speed."""
    outcomes = tuple(outcomes)
    errors = {
        check.code
        for check in registry.discover()
        if check.severity == "error"
        and not check.may_raise
        and check.area != "device"  # speed needs a GPU too
    }
    others = [
        each.code
        for each in outcomes
        if each.code in errors and each.outcome in ("unknown", "crashed") and not _waits_for_trial(each)
    ]
    told = may_raise(outcomes, verdict, facts)
    if others:
        told.append(f"{plural(len(others), 'check')} without an answer ({', '.join(others)})")
    if verdict.basis != "measured":
        told.append("how fast it is" if if_recorded(uses_fp8, facts) else "what FP8 would give")
    return told


def _reason(outcome: Outcome, facts: Facts) -> str:
    known = registry.reason_of(outcome, facts) or outcome.reason
    return (known or "its facts were not recorded").rstrip(".")


def _waits_for_trial(outcome: Outcome) -> bool:
    """Return whether a check waits for times, for which the question of speed stands."""
    return outcome.get("missing", "").partition(".")[0] in ("trial", "observed")
