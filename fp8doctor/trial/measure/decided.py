"""What the rounds of a window are taken for: whether FP8 is faster than the best BF16."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fp8doctor.analysis import outcome
from fp8doctor.analysis.median_interval import interval
from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, is_conversion
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.measure.attempt import Samples, full_ms
from fp8doctor.trial.variant import ArmPlan


def is_decided(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    """Whether the rounds tell the step in FP8 from the best BF16, or that the two are even.

    FP8 is the step as it is, or the fastest conversion of a model without FP8. A window without both asks
    nothing.
    """
    times = {each.name: full_ms(plan, samples, each) for each in arms if each.name != ArmName.SELF_CHECK}
    in_fp8 = any(each.name == ArmName.AS_IS and each.fp8 for each in arms)
    totals = [times[name] for name in times if (name == ArmName.AS_IS if in_fp8 else is_conversion(name))]
    of_bf16 = [times[name] for name in (BF16_BASELINES if in_fp8 else BASELINES) if name in times]
    if not totals or not of_bf16:
        return True
    fp8, bf16 = min(totals, key=statistics.median), min(of_bf16, key=statistics.median)
    return outcome.is_decided(interval([a / b for a, b in zip(bf16, fp8, strict=True)]))
