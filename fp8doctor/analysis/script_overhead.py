"""What a watched script's own step takes beyond a copy of the step that a trial timed."""

from __future__ import annotations

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.median_interval import interval
from fp8doctor.analysis.waiting import MEND_FIRST, counts, waiting
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import percent


def script_overhead(facts: Facts) -> str:
    """Say how much longer the script's step is, beyond its waits and the scatter of both; else empty."""
    if facts.observed.clock != "cuda" or not recorded(facts, "trial.arms") or facts.trial.device == "cpu":
        return ""
    copy = arm(facts.trial, ArmName.AS_IS)
    if copy is None or not copy.step_ms:
        return ""
    own, waits = interval(facts.observed.steps_ms), waiting(facts)
    waited_ms = max(waits.before_forward_ms or 0.0, waits.told_ms)
    longest = copy.high_ms if recorded(copy, "high_ms") and copy.high_ms else copy.step_ms
    if not counts(own.low - waited_ms - longest, own.median):
        return ""
    return (
        f"The script's own step takes {own.median:,.1f} ms ({own.low:,.1f} to {own.high:,.1f}), a copy of it "
        f"{copy.step_ms:,.1f} ms: {_where(facts)}. {MEND_FIRST}"
    )


def _where(facts: Facts) -> str:
    """Say what is known of the difference."""
    found = facts.observed.breakdown if recorded(facts, "observed.breakdown") else None
    if found is None or not found.reliable or found.host_wait_pct is None:
        return "the rest is what the script does beside it"
    return (
        f"in the script the GPU is idle for {found.idle_ms:,.1f} ms, and {percent(found.host_wait_pct)} of "
        "its gaps end with a kernel that was launched too late, as where data workers or logging hold the "
        "host's cores"
    )
