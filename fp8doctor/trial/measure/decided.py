"""What the rounds of a window are taken for: first whether FP8 beats the best BF16, then what else gains."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from fp8doctor.analysis import significance
from fp8doctor.analysis.arms import BF16_WITH
from fp8doctor.analysis.noise import swallows_effect
from fp8doctor.analysis.significance import EVEN, Interval, interval
from fp8doctor.analysis.treatment_table import that_help_bf16_too
from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, is_conversion
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.measure.attempt import Samples, full_ms
from fp8doctor.trial.variant import ArmPlan, explores

PRESCRIPTIONS = (ArmName.PRESCRIBED, ArmName.PRESCRIBED_AS_COMPILED, ArmName.COMBINATION)
"""Arms of which the fastest becomes the prescription."""


def is_decided(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    """Whether the rounds tell FP8 from BF16, and whether what seems to gain does."""
    gained = [gain for gain in gains(samples, plan, arms).values() if gain.median > 1 + EVEN]
    return all(gain.low > 1 for gain in gained) and all(
        map(significance.is_decided, _speedups(samples, plan, arms))
    )


def sign_is_told(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    """Whether the verdict will tell FP8 from the best BF16, or call the two even; true of a window without
    both, which does not ask it. `is_decided` asks for more, within the time that there is.

    FP8 is the step as it is, or the fastest conversion of a model without FP8, and the prescription where
    that seems to be faster.
    """
    return not any(map(swallows_effect, _speedups(samples, plan, arms)))


def _speedups(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> Iterator[Interval]:
    """Divide the times of BF16 by those of each FP8 that the verdict holds to them."""
    times = _times(samples, plan, arms)

    def fastest(*names: str) -> str | None:
        timed = [each for each in names if each in times]
        return min(timed, key=lambda each: statistics.median(times[each]), default=None)

    if not any(each.name == ArmName.AS_IS and each.fp8 for each in arms):
        converted, bf16 = fastest(*filter(is_conversion, times)), fastest(*BASELINES)
        if converted and bf16:
            yield _ratio(times[bf16], times[converted])
        return
    bf16, prescribed = fastest(*BF16_BASELINES), fastest(*PRESCRIPTIONS)
    if bf16:
        yield _ratio(times[bf16], times[ArmName.AS_IS])
    if prescribed is None or fastest(ArmName.AS_IS, prescribed) == ArmName.AS_IS:
        return
    changes = next(each.treatments for each in arms if each.name == prescribed)
    if shared := that_help_bf16_too(changes):  # as `fp8doctor.analysis.arms.fair_bf16`
        name = BF16_WITH.get(frozenset(shared))
        bf16 = fastest(name, *BF16_BASELINES) if name in times else None
    if bf16:
        yield _ratio(times[bf16], times[prescribed])


def gains(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> dict[str, Interval]:
    """Divide the time of what each exploration changes by its own."""
    times = _times(samples, plan, arms)
    return {
        each.name: _ratio(times[each.base], times[each.name])
        for each in arms
        if explores(each) and each.base in times
    }


def _times(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> dict[str, list[float]]:
    return {each.name: full_ms(plan, samples, each) for each in arms if each.name != ArmName.SELF_CHECK}


def _ratio(before: Sequence[float], after: Sequence[float]) -> Interval:
    return interval([a / b for a, b in zip(before, after, strict=True)])
