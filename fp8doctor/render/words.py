"""Words and marks for fixes, parts of a step, areas, and the basis of a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.treatment_table import (
    AS_YOU_RUN_IT,
    COMPILE_BLOCKS,
    VARIANTS,
    family,
    in_words,
    variant,
)
from fp8doctor.facts import Arm, recorded
from fp8doctor.facts.arm_names import ArmName, in_any_window
from fp8doctor.finding import Basis
from fp8doctor.wording import plural

NOT_PROFILED = "not profiled"
"""Stands for the parts of a step if they are not known."""

FAMILIES = {
    "matmul": ("FP8 matmul", "other matmul"),
    "casts": ("casts",),
    "attention": ("attention",),
    "other": ("other",),
    "idle": ("idle",),
}
"""Parts of a bar, in a user's words -> columns of the table of ``-v``."""

HOW_KNOWN: dict[Basis, str] = {"measured": "measured", "modelled": "estimated", "rule": "by rule"}
"""Basis of a number -> the same in words."""

AREAS = {"engagement": "FP8 engaged", "lora": "LoRA", "step": "step time"}
"""Areas of checks -> what they are about; the others are words."""


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


def more_variants(count: int) -> str:
    """Name several variants that are shown together."""
    return plural(count, "more variant")


Mark = Literal["bad", "warning", "info", "healthy", "not_applicable", "unknown"]

MARKS: dict[Mark, tuple[str, str, str]] = {
    "bad": ("✗", "x", "bold red"),
    "warning": ("!", "!", "bold yellow"),
    "info": ("i", "i", "cyan"),
    "healthy": ("✓", "ok", "green"),
    "not_applicable": ("–", "-", "dim"),
    "unknown": ("?", "?", "magenta"),
}
"""Mark -> glyph, the same in ASCII, and style."""


class Line(Struct, frozen=True):
    """One line about an area."""

    mark: Mark
    area: str
    text: str = ""
    codes: tuple[str, ...] = ()
    """The checks that it tells of, if there may be several."""
