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
    is_total,
    ratio_on_screen,
    timed_a_model,
    timed_on_cpu,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.compile_coverage import compiles_each_block
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, is_noise
from fp8doctor.analysis.treatment_table import traits
from fp8doctor.facts import Arm, Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES, ArmName, is_conversion


class PlanEnd(Struct, frozen=True):
    """The variant that the plan ends in, and what turns the step as it is into it."""

    arm: Arm
    in_bf16: bool
    """True if no layer of it runs in FP8."""
    changes: tuple[str, ...]
    """Treatments besides the conversion, or besides leaving FP8 off and compiling."""

    @property
    def is_as_is(self) -> bool:
        return self.arm.name == ArmName.AS_IS


def plan_end(facts: Facts) -> PlanEnd | None:
    """Find the best variant that was timed; None without a GPU, or if the step as it is has no time.

    It has the fewest changes of those within 2% of the fastest; the job's own precision comes first. In doubt
    the user's own step stays. No plan ends in a step that is not finite, unless BF16's is not either.
    """
    if not timed_a_model(facts) or timed_on_cpu(facts):
        return None
    as_is, bf16, in_fp8 = arm(facts.trial, ArmName.AS_IS), best_bf16(facts), uses_fp8(facts)
    if as_is is None or bf16 is None or as_is.step_ms is None:
        return None
    own = PlanEnd(as_is, not in_fp8, ())
    every = [each for each in (own, *_others(facts)) if is_finite(each.arm) or not is_finite(bf16)]
    fastest = min(every, key=lambda each: each.arm.step_ms or 0.0)
    near = [each for each in every if _is_as_fast(each, fastest)]

    def place(each: PlanEnd) -> tuple[object, ...]:
        other = each.in_bf16 == in_fp8  # the other precision is a change too
        return not each.is_as_is, len(each.changes) + other, other, each.arm.step_ms

    best = min(near, key=place)
    doubtful = ratio_on_screen(as_is, best.arm).low <= 1 or is_noise(as_is, best.arm, facts.trial)
    return own if own in every and doubtful else best


def _is_as_fast(each: PlanEnd, fastest: PlanEnd) -> bool:
    """Return whether a variant is as fast as the fastest, by what two copies of one step differ, or by noise.

    Noise alone does not turn a plan from BF16 to FP8, or back.
    """
    slower = ratio_on_screen(each.arm, fastest.arm)
    alike = each.in_bf16 == fastest.in_bf16
    return slower.median <= 1 + SELF_CHECK_TOLERANCE or (alike and slower.low <= 1)


def _others(facts: Facts) -> Iterator[PlanEnd]:
    """List the other totals, the simplest first: BF16, then by the number of changes, the plan first."""
    trial, in_fp8 = facts.trial, uses_fp8(facts)
    bf16 = best_bf16(facts)
    if bf16 is not None and bf16.name != ArmName.AS_IS:
        yield PlanEnd(bf16, True, ())
    timed = [each for each in trial.arms if each.tried and each.step_ms and recorded(each, "treatments")]
    for each in _by_time(timed):
        if changes := changes_in_bf16(each.name, each.treatments):
            yield PlanEnd(each, True, tuple(sorted(changes)))
    totals = [each for each in timed if is_total(each)]
    whole = [each for each in totals if each.name == ArmName.PRESCRIBED]
    found = [
        PlanEnd(each, not (in_fp8 or is_conversion(each.name)), tuple(changes_of(facts, each)))
        for each in (*whole, *_by_time([each for each in totals if each not in whole]))
    ]
    yield from sorted(found, key=lambda each: len(each.changes))


def changes_of(facts: Facts, of: Arm) -> list[str]:
    """List what turns the step as it is into a variant; blocks that the user compiles stay compiled."""
    compiled = is_conversion(of.name) and compiles_each_block(facts)
    return [name for name in all_changes(facts.trial, of) if not (compiled and traits(name).compiles)]


def _by_time(arms: list[Arm]) -> list[Arm]:
    return sorted(arms, key=lambda each: each.step_ms or 0.0)


def bf16_of_the_plan(facts: Facts) -> Arm | None:
    """Find the form of the BF16 that the plan ends in, else of the fastest; None if no GPU timed any.

    Of one with changes it is the baseline that they change.
    """
    end = if_recorded(plan_end, facts)
    if end is None or not end.in_bf16:
        return if_recorded(best_bf16, facts) if timed_on_gpu(facts) else None
    return form_of(facts, end.arm) or end.arm


def form_of(facts: Facts, of: Arm) -> Arm | None:
    """Find the baseline that a BF16 variant changes, or changes a change of."""
    below: Arm | None = of
    while below is not None and below.name not in BASELINES:
        below = arm_if_any(facts, below.get("base") or "")
    return below
