"""Names of a trial's variants, as tables and sentences call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.outcome import own_words
from fp8doctor.analysis.treatment_table import (
    AS_YOU_RUN_IT,
    COMPILE_BLOCKS,
    VARIANTS,
    family,
    in_words,
    variant,
)
from fp8doctor.facts import Arm, Facts, recorded
from fp8doctor.facts.arm_names import ArmName, in_any_window


def labels(facts: Facts, fixes: Mapping[str, int] | None = None) -> dict[str, str]:
    """Name every variant of a trial, by the numbers of the fixes that are in it."""
    fp8, own = recorded(facts, "network") and uses_fp8(facts), own_words(facts)
    return {arm.name: variant_of(arm, facts.arms(), fp8, fixes, own) for arm in facts.arms()}


def variant_of(
    arm: Arm, arms: Sequence[Arm], fp8: bool, plan: Mapping[str, int] | None, own: str = AS_YOU_RUN_IT
) -> str:
    """Name a variant with its fixes; ``plan`` are those of the plan, None if that is unknown."""
    fixes = plan or {}
    if in_any_window(arm.name) == ArmName.PRESCRIBED:
        made_of = _treatments(arm)
        named = _with_fixes(made_of, fixes)
        if not named and plan is not None and made_of:  # the plan ends elsewhere
            named = f"FP8, {', '.join(map(in_words, made_of))}"
        return named or variant(ArmName.PRESCRIBED, fp8)
    alone = _treatments(arm)
    if arm.name == ArmName.BF16_PRESCRIBED and alone and plan is not None:
        numbers = numbered(alone, fixes)
        return f"BF16 with {numbers}" if numbers else f"BF16, {', '.join(map(in_words, alone))}"
    if arm.name == ArmName.AS_IS or (arm.name in VARIANTS and arm.name != ArmName.WITHOUT_ADAPTERS):
        return variant(arm.name, fp8, own=own)
    again = alone == (COMPILE_BLOCKS,) and any(each.name == ArmName.BF16_AS_COMPILED for each in arms)
    name = variant(
        arm.name, fp8, own=own, change="by block" if again else ""
    )  # it is compiled now, in another form
    base = arm.get("base")
    by_block = base == COMPILE_BLOCKS
    if base is None or not (by_block or in_any_window(base) == ArmName.PRESCRIBED):
        return (_with_fixes(alone, fixes) if fp8 else "") or name
    kinds = {family(each) for each in alone}  # of which the last stands
    of_base = next((_treatments(each) for each in arms if each.name == base), ())
    below = tuple(each for each in of_base if family(each) not in kinds)
    if alone and (both := _with_fixes((*below, *alone), fixes)):
        return both
    if by_block:
        return f"{name}, by block"
    if of_base and not below:  # it stands in place of all that its base changes
        return name
    numbers = numbered(below, fixes) or "all fixes"
    if plan is not None and below and not any(each in fixes for each in below):
        numbers = ", ".join(map(in_words, below))
    return f"{name}, {numbers}"


def _treatments(arm: Arm) -> tuple[str, ...]:
    return arm.treatments if recorded(arm, "treatments") else ()


def _with_fixes(treatments: Sequence[str], fixes: Mapping[str, int]) -> str:
    numbers = numbered(treatments, fixes)
    return f"FP8 with {numbers}" if numbers else ""


def numbered(treatments: Sequence[str], fixes: Mapping[str, int]) -> str:
    """Write the fixes' numbers: ``fix 1``, ``fixes 1 and 2``; empty if one has none."""
    if not treatments or not all(each in fixes for each in treatments):
        return ""
    numbers = sorted({fixes[each] for each in treatments})
    *others, last = map(str, numbers)
    return f"fixes {', '.join(others)} and {last}" if others else f"fix {last}"
