"""A user's words in place of names of variants, recipes and parts of a step: what is shown takes them from
here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fp8doctor.analysis.te_recipes import TE_RECIPES
from fp8doctor.facts import Arm, recorded
from fp8doctor.facts.arm_names import (
    ArmName,
    in_any_window,
    is_conversion,
    keeps_users_compilation,
    recipe_of,
)
from fp8doctor.wording import plural

VARIANTS: dict[str, str] = {
    ArmName.BF16: "BF16",
    ArmName.BF16_COMPILED: "BF16 compiled",
    ArmName.BF16_AS_COMPILED: "BF16 compiled your way",
    ArmName.BF16_WITHOUT_CHECKPOINTING: "BF16, no checkpointing",
    ArmName.SELF_CHECK: "the same step again",
    ArmName.COMBINATION: "FP8 with all that gained",
    ArmName.WITHOUT_ADAPTERS: "FP8 without adapters",
    "as_is_compiled": "FP8 compiled",
}
"""Name of an arm -> what a user calls it; `variant` knows the others."""

RECIPES = {
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
    "rowwise_with_gw_hp": "rowwise with BF16 weight gradients",
    **{each.recipe: each.words for each in TE_RECIPES.values()},
}
"""Recipe -> the same in words."""

CHANGES = {
    "adapters-to-bf16": "BF16 adapters",
    "attention-sdpa": "fused attention",
    "autocast-bf16": "BF16 autocast",
    "bf16-parameters": "BF16 weights",
    "cache-off": "no KV cache",
    "checkpointing-off": "no checkpointing",
    "compile-blocks": "compiled",
    "compile-layers": "layers compiled",
    "compile-model": "compiled",
    "cuda-graphs": "CUDA graphs",
    "fused-attention-on": "fused attention",
    "fused-optimizer": "fused optimizer",
    "keep-in-bf16": "some layers in BF16",
    "larger-batch": "larger batch",
    "te-autocast": "switched on",
}
"""Treatment that was timed alone -> what is added to the name of the step that it changes."""

RECIPE_CHANGE = "recipe-"
"""How the names of treatments begin that change torchao's recipe."""

NOT_PROFILED = "not profiled"
"""Stands for the parts of a step where they are not known."""

FAMILIES = {
    "matmul": ("FP8 GEMM", "other GEMM"),
    "FP8 conversion": ("casts",),
    "attention": ("attention",),
    "other": ("other",),
    "idle": ("idle",),
}
"""Parts of a bar, in a user's words -> columns of the table of ``-v``."""

PARTS = {
    "GEMMs": "matmuls",
    "casts": "FP8 conversion",
    "norms and pointwise": "norms, pointwise",
    "idle": "idle GPU",
    "unclassified": "rest",
}
"""Parts of a difference -> the same in words; the others are words."""

AREAS = {"engagement": "FP8 engaged", "lora": "LoRA", "step": "step time"}
"""Areas of checks -> what they are about; the others are words."""

PLAIN = {
    r"\b[Ee]ager float8\b": "uncompiled FP8",
    r"\brun eagerly\b": "run uncompiled",
    r"\bCasts cost\b": "Converting to FP8 costs",
    r"\bcasts cost\b": "converting to FP8 costs",
    r"\bCasts\b": "FP8 conversions",
    r"\bcasts\b": "FP8 conversions",
    r"\bcast\b": "converted",
    r"\bGEMMs\b": "matmuls",
    r"\bGEMM FLOPs\b": "matmul FLOPs",
    r"\bGEMM\b": "matmul",
    r"(?<=\d)x(?= )": "×",
    r" x (?=\d)": " × ",
}
"""What checks and verdicts call something -> what a user calls it."""


def plainly(text: str) -> str:
    """Write a sentence of a check in a user's words."""
    for technical, plain in PLAIN.items():
        text = re.sub(technical, plain, text)
    return text


def variant(name: str, fp8: bool) -> str:
    """Name a variant of the step; ``fp8`` says whether the job as it is trains in FP8."""
    if name in VARIANTS:
        return VARIANTS[name]
    if name == ArmName.AS_IS:
        return "FP8 as you run it" if fp8 else "as you run it"
    if name == ArmName.PRESCRIBED:
        return "FP8 with all fixes"
    if is_conversion(name):
        way = "compiled your way" if keeps_users_compilation(name) else "compiled"
        return f"FP8 {RECIPES.get(recipe_of(name), recipe_of(name))} {way}"
    if name in TE_RECIPES:
        return f"FP8, {TE_RECIPES[name].words}"
    if name.startswith(RECIPE_CHANGE):
        recipe = name.removeprefix(RECIPE_CHANGE).replace("-", "_")
        return f"FP8 {RECIPES.get(recipe, recipe)}"
    return f"{'FP8' if fp8 else 'as you run it'}, {CHANGES.get(name) or name.replace('-', ' ')}"


def variant_of(arm: Arm, arms: Sequence[Arm], fp8: bool, fixes: Mapping[str, int]) -> str:
    """Name a variant, and say which fixes are in it; ``fixes`` are treatments with their numbers."""
    if arm.name == ArmName.PRESCRIBED:
        return _with_fixes(_treatments(arm), fixes) or variant(arm.name, fp8)
    if arm.name in VARIANTS or arm.name == ArmName.AS_IS:
        return variant(arm.name, fp8)
    alone = _treatments(arm)
    base = arm.base if recorded(arm, "base") else None
    if base is None or in_any_window(base) != ArmName.PRESCRIBED:
        return _with_fixes(alone, fixes) or variant(arm.name, fp8) if fp8 else variant(arm.name, fp8)
    below = next((_treatments(each) for each in arms if each.name == base), ())
    if both := _with_fixes((*below, *alone), fixes):
        return both
    numbers = _numbers(below, fixes)
    return f"{variant(arm.name, fp8)}, {numbers or 'all fixes'}"


def _treatments(arm: Arm) -> tuple[str, ...]:
    return arm.treatments if recorded(arm, "treatments") else ()


def _with_fixes(treatments: Sequence[str], fixes: Mapping[str, int]) -> str:
    numbers = _numbers(treatments, fixes)
    return f"FP8 with {numbers}" if numbers else ""


def _numbers(treatments: Sequence[str], fixes: Mapping[str, int]) -> str:
    """Write the numbers of the fixes: ``fix 1``, ``fixes 1 and 2``; empty unless each has one."""
    numbers = sorted({fixes[each] for each in treatments if each in fixes})
    if not numbers or not all(each in fixes for each in treatments):
        return ""
    return f"fix {numbers[0]}" if len(numbers) == 1 else f"fixes {' and '.join(map(str, numbers))}"


def more_variants(count: int) -> str:
    """Name several variants that are told together."""
    return f"{plural(count, 'more variant')}"
