"""The table of variants: each form of the training step with its time, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fp8doctor.analysis.arms import (
    all_changes,
    arm_if_any,
    best_bf16,
    changes_in_bf16,
    is_finite,
    is_total,
    labels,
    ratio,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.compile_coverage import compiles_each_block
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, speed
from fp8doctor.analysis.significance import Number, interval
from fp8doctor.analysis.treatment_table import traits
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import BASELINES, ArmName, is_conversion


class Variant(Struct, frozen=True):
    """One form of the training step."""

    name: str
    """As the JSON names it: ``as_is``, ``bf16_compiled``, ``planned``."""
    words: str
    in_fp8: bool
    ms: Number
    rounds: int = 0
    """How often it was timed; 0 for an estimate."""
    changes: tuple[str, ...] = ()
    """Treatments that make it of the step as it is, besides leaving FP8 off, converting and compiling."""
    arm: Arm = Arm()
    """As the trial timed it; empty for an estimate."""

    @property
    def is_as_is(self) -> bool:
        return self.name == ArmName.AS_IS


def timed_variants(facts: Facts) -> list[Variant]:
    """List the variants that a GPU timed and a user could run: the step as it is, the best BF16, changes."""
    if not timed_on_gpu(facts) or not recorded(facts, "network"):
        return []
    in_fp8, bf16, words, found = uses_fp8(facts), best_bf16(facts), labels(facts), []
    for each in facts.trial.arms:
        if not each.tried or not each.step_ms:
            continue
        changes, of_fp8 = tuple[str, ...](), False
        treatments = each.get("treatments", ())
        if each.name == ArmName.AS_IS:
            of_fp8 = in_fp8
        elif is_total(each) or is_conversion(each.name):
            changes, of_fp8 = tuple(changes_of(facts, each)), in_fp8 or is_conversion(each.name)
        elif each is not bf16 and not (changes := tuple(sorted(changes_in_bf16(each.name, treatments)))):
            continue
        rounds = interval(each.rounds_ms)
        ms = Number(each.step_ms, min(rounds.low, each.step_ms), max(rounds.high, each.step_ms))
        found.append(Variant(each.name, words[each.name], of_fp8, ms, len(each.rounds_ms), changes, each))
    return found


def best_of(table: Sequence[Variant], in_fp8: bool, trial: Trial) -> Variant | None:
    """Choose the variant with the fewest changes of those within 2% of the fastest; another precision is one.

    In doubt the user's own step stays. Noise ties two of one precision too. What is not finite does not
    count, unless BF16 is not either. None if the step as it is, or every BF16, has no time.
    """
    now = next((each for each in table if each.is_as_is), None)
    if now is None or all(each.in_fp8 for each in table):
        return None
    if any(is_finite(each.arm) for each in table if not each.in_fp8):
        table = [each for each in table if is_finite(each.arm)]
    fastest = min(table, key=lambda each: each.ms.value)

    def is_as_fast(each: Variant) -> bool:
        slower = ratio(each.arm, fastest.arm)
        tied = each.in_fp8 == fastest.in_fp8 and slower.low <= 1
        return tied or slower.value <= 1 + SELF_CHECK_TOLERANCE

    def place(each: Variant) -> tuple[object, ...]:
        other = each.in_fp8 != in_fp8
        return not each.is_as_is, len(each.changes) + other, other, each.ms.value

    best = min(filter(is_as_fast, table), key=place)
    if best is now or now not in table:
        return best
    faster = speed(best.arm, now.arm, trial)
    return now if faster.side == "open" or faster.low <= 1 else best


def changes_of(facts: Facts, of: Arm) -> list[str]:
    """List what turns the step as it is into a variant; blocks that the user compiles stay compiled."""
    compiled = is_conversion(of.name) and compiles_each_block(facts)
    return [name for name in all_changes(facts.trial, of) if not (compiled and traits(name).compiles)]


def plan_end(facts: Facts) -> Variant | None:
    """Find the variant that a plan ends in; None unless a GPU timed the step as it is and a BF16."""
    table = timed_variants(facts)
    return best_of(table, uses_fp8(facts), facts.trial) if table else None


def bf16_of_the_plan(facts: Facts) -> Arm | None:
    """Find the form of the BF16 that the plan ends in, else of the fastest; None if no GPU timed any.

    Of one with changes it is the baseline that they change.
    """
    end = if_recorded(plan_end, facts)
    if end is None or end.in_fp8:
        return if_recorded(best_bf16, facts) if timed_on_gpu(facts) else None
    return form_of(facts, end.arm) or end.arm


def form_of(facts: Facts, of: Arm) -> Arm | None:
    """Find the baseline that a BF16 variant changes, or changes a change of."""
    below: Arm | None = of
    while below is not None and below.name not in BASELINES:
        below = arm_if_any(facts, below.get("base") or "")
    return below
