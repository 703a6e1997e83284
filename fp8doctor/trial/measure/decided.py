"""What the rounds of a window are taken for: whether FP8 beats the best BF16, and what else gains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fp8doctor.analysis import outcome
from fp8doctor.analysis.median_interval import Interval, interval
from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, is_conversion
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.measure.attempt import Samples, full_ms
from fp8doctor.trial.variant import ArmPlan, explores


def is_decided(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    """Whether the rounds tell the step in FP8 from the best BF16, or that the two are even, and whether what
    seems to gain does.

    FP8 is the step as it is, or the fastest conversion of a model without FP8. A window without both asks
    only what gains.
    """
    gained = [gain for gain in gains(samples, plan, arms).values() if gain.median > 1 + outcome.EVEN]
    return all(gain.low > 1 for gain in gained) and _tells_fp8_from_bf16(samples, plan, arms)


def _tells_fp8_from_bf16(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    times = _times(samples, plan, arms)
    in_fp8 = any(each.name == ArmName.AS_IS and each.fp8 for each in arms)
    totals = [times[name] for name in times if (name == ArmName.AS_IS if in_fp8 else is_conversion(name))]
    of_bf16 = [times[name] for name in (BF16_BASELINES if in_fp8 else BASELINES) if name in times]
    if not totals or not of_bf16:
        return True
    fp8, bf16 = min(totals, key=statistics.median), min(of_bf16, key=statistics.median)
    return outcome.is_decided(_ratio(bf16, fp8))


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
