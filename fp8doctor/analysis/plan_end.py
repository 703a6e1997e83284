"""The variant that a plan ends in: the simplest of the fastest that a GPU timed."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from fp8doctor.analysis.arms import (
    all_changes,
    arm,
    arm_if_any,
    best_bf16,
    changes_in_bf16,
    is_finite,
    ratio_on_screen,
    timed_a_model,
    timed_on_cpu,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, is_noise
from fp8doctor.analysis.treatment_table import CUDA_GRAPHS
from fp8doctor.facts import Arm, Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES, IN_BF16, ArmName, is_conversion, is_of_first_window


class PlanEnd(Struct, frozen=True):
    """The variant that the plan ends in, and what turns the step as it is into it."""

    arm: Arm
    in_bf16: bool
    """True if no layer of it runs in FP8."""
    changes: tuple[str, ...]
    """Treatments beside the conversion, or beside leaving FP8 off and compiling."""

    @property
    def is_as_is(self) -> bool:
        return self.arm.name == ArmName.AS_IS


def plan_end(facts: Facts) -> PlanEnd | None:
    """Find the best variant that was timed; None without a GPU, or if the step as it is has no time.

    From the simplest on, a variant replaces another that is slower by more than two copies of one step may
    differ. Of a step that the user runs already, and before FP8 is begun with, noise must not hide that. No
    plan ends in a step whose loss or gradients are not finite, unless BF16's are not either.
    """
    if not timed_a_model(facts) or timed_on_cpu(facts):
        return None
    as_is, bf16 = arm(facts.trial, ArmName.AS_IS), best_bf16(facts)
    if as_is is None or bf16 is None:
        return None
    best, others = PlanEnd(as_is, not uses_fp8(facts), ()), list(_others(facts))
    if is_finite(bf16):
        others = [each for each in others if is_finite(each.arm)]
        best = best if is_finite(as_is) else PlanEnd(bf16, True, ())
    for each in others:
        faster = ratio_on_screen(best.arm, each.arm)
        begins_fp8 = not (uses_fp8(facts) or each.in_bf16)
        across = best.in_bf16 != each.in_bf16
        unsure = faster.low <= 1 or (across and is_noise(best.arm, each.arm, facts.trial))
        if faster.median > 1 + SELF_CHECK_TOLERANCE and not (unsure and (best.is_as_is or begins_fp8)):
            best = each
    return best


def _others(facts: Facts) -> Iterator[PlanEnd]:
    """List the other totals, the simplest first: BF16, the plan, then what was tried beside it."""
    trial, in_fp8 = facts.trial, uses_fp8(facts)
    bf16 = best_bf16(facts)
    if bf16 is not None and bf16.name != ArmName.AS_IS:
        yield PlanEnd(bf16, True, ())
    timed = [each for each in trial.arms if each.tried and each.step_ms and recorded(each, "treatments")]
    for each in _by_time(timed):
        if changes := changes_in_bf16(each.name, each.treatments):
            yield PlanEnd(each, True, tuple(sorted(changes - {CUDA_GRAPHS})))  # which is how it is compiled
    whole = arm(trial, ArmName.PRESCRIBED)
    totals = [each for each in timed if _is_total(each)]
    for each in (*filter(None, [whole]), *_by_time(totals)):
        yield PlanEnd(each, not (in_fp8 or is_conversion(each.name)), tuple(all_changes(trial, each)))


def is_in_fp8(each: Arm) -> bool:
    """Return whether it is a total of a job in FP8, in its last window."""
    return each.name in (ArmName.AS_IS, ArmName.PRESCRIBED) or _is_total(each)


def _is_total(each: Arm) -> bool:
    """Return whether it is a changed step that a user could run."""
    return (
        each.name not in (*IN_BF16, ArmName.AS_IS, ArmName.PRESCRIBED, ArmName.WITHOUT_ADAPTERS)
        and not is_of_first_window(each.name)
        and bool(each.get("treatments"))
    )


def _by_time(arms: list[Arm]) -> list[Arm]:
    return sorted(arms, key=lambda each: each.step_ms or 0.0)


def bf16_of_the_plan(facts: Facts) -> Arm | None:
    """Find the form of the BF16 that the plan ends in, else of the fastest; None if no GPU timed any.

    Of one with other changes than CUDA graphs it is the baseline that they change.
    """
    end = if_recorded(plan_end, facts)
    if end is None or not end.in_bf16:
        return if_recorded(best_bf16, facts) if timed_on_gpu(facts) else None
    changed = end.arm.name not in (*BASELINES, ArmName.BF16_CUDA_GRAPHS)
    return (arm_if_any(facts, end.arm.get("base") or "") if changed else None) or end.arm
