"""Names of a trial's variants, as tables and sentences call them: by their changes."""

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
from fp8doctor.facts.arm_names import ArmName, is_withdrawn


def labels(facts: Facts) -> dict[str, str]:
    """Name every variant of a trial."""
    fp8, own = recorded(facts, "network") and uses_fp8(facts), own_words(facts)
    return {arm.name: variant_of(arm, facts.arms(), fp8, own) for arm in facts.arms()}


def variant_of(arm: Arm, arms: Sequence[Arm], fp8: bool, own: str = AS_YOU_RUN_IT) -> str:
    """Name a variant by what it changes, and by what the variant changes that it is built on."""
    name, alone = arm.name, arm.get("treatments", ())
    if alone and (name in (ArmName.PRESCRIBED, ArmName.BF16_PRESCRIBED) or is_withdrawn(name)):
        return ", ".join(("BF16" if name == ArmName.BF16_PRESCRIBED else "FP8", *map(in_words, alone)))
    if name == ArmName.AS_IS or (name in VARIANTS and name != ArmName.WITHOUT_ADAPTERS):
        return variant(arm.name, fp8, own=own)
    again = alone == (COMPILE_BLOCKS,) and any(each.name == ArmName.BF16_AS_COMPILED for each in arms)
    base = next((each for each in arms if each.name == arm.get("base")), None)
    kinds = {family(each) for each in alone}  # of which the last stands
    below = [each for each in base.get("treatments", ()) if family(each) not in kinds] if base else []
    own_name = variant(arm.name, fp8, own=own, change="by block" if again else "")
    return ", ".join((own_name, *map(in_words, below)))


def numbered(treatments: Sequence[str], fixes: Mapping[str, int]) -> str:
    """Write the fixes' numbers: ``fix 1``, ``fixes 1 and 2``; empty if one has none."""
    if not treatments or not all(each in fixes for each in treatments):
        return ""
    numbers = sorted({fixes[each] for each in treatments})
    *others, last = map(str, numbers)
    return f"fixes {', '.join(others)} and {last}" if others else f"fix {last}"
