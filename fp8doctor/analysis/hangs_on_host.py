"""Whether an answer hangs on a disturbed host: it is what made the steps that are compared noisy, or turned
them."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.arms import best_fp8, fair_bf16, ratio, uses_fp8
from fp8doctor.analysis.host_disturbance import (
    disturbance,
    doubt,
    late_on_the_other_side,
    waits_now_and_then,
)
from fp8doctor.analysis.outcome import is_noise, measured_speed
from fp8doctor.analysis.significance import interval, swallows_effect
from fp8doctor.facts import Arm, Facts, Trial, recorded
from fp8doctor.facts.arm_names import ArmName


def hangs_on(facts: Facts) -> str | None:
    """Tell what of the host the answer hangs on (`moved_by_it`); None where nothing disturbed it, and where
    the times are doubtful for it anyway."""
    if not recorded(facts, "trial.host") or doubt(facts.trial) or moved_by_it(facts) is None:
        return None
    return disturbance(facts.trial.host)


def moved_by_it(facts: Facts) -> Arm | None:
    """Find the step that a disturbed host can have moved to the other side of BF16, or so much that the
    timing does not tell."""
    if facts.trial.device == "cpu":
        return None
    moved = (_noisier_or_late(bf16, fp8, facts.trial) for fp8, bf16 in _compared(facts))
    return next((each for each in moved if each and waits_now_and_then(each)), None)


def _noisier_or_late(bf16: Arm, fp8: Arm, trial: Trial) -> Arm | None:
    late = late_on_the_other_side(bf16, fp8, trial)
    if is_noise(bf16, fp8, trial) and (late is None or swallows_effect(ratio(bf16, fp8))):
        return max(fp8, bf16, key=_spread)
    return late


def _compared(facts: Facts) -> Iterator[tuple[Arm, Arm]]:
    """Name the steps that an answer holds to each other, each FP8 with its BF16: FP8 as it is, then the
    fastest form of it, which is the fastest conversion of a model without FP8."""
    if not recorded(facts, "network"):
        return
    measured = measured_speed(facts)
    if measured is not None:
        yield measured.as_is, measured.bf16
    elif uses_fp8(facts):
        return
    fp8 = best_fp8(facts)
    bf16 = fair_bf16(facts, fp8) if fp8 else None
    if fp8 is not None and bf16 is not None and fp8.name != ArmName.AS_IS:
        yield fp8, bf16


def _spread(timed: Arm) -> float:
    known = interval(timed.rounds_ms)
    return (known.high - known.low) / known.median
