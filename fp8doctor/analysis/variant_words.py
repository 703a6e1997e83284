"""Names of the variants of a step for users, in progress and in reports."""

from __future__ import annotations

from fp8doctor.analysis.treatment_table import changes_recipe, in_words, recipe_after
from fp8doctor.facts.arm_names import ArmName, is_conversion, keeps_users_compilation, recipe_of
from fp8doctor.recipes import BY_TREATMENT, named

AS_YOU_RUN_IT = "as you run it"

VARIANTS: dict[str, str] = {
    ArmName.BF16: "BF16",
    ArmName.BF16_COMPILED: "BF16 compiled",
    ArmName.BF16_AS_COMPILED: "BF16 compiled your way",
    ArmName.BF16_WITHOUT_CHECKPOINTING: "BF16, no checkpointing",
    ArmName.BF16_CUDA_GRAPHS: "BF16, CUDA graphs",
    ArmName.SELF_CHECK: "the same step again",
    ArmName.PRESCRIBED_AS_COMPILED: "FP8 with all fixes, compiled your way",
    ArmName.COMBINATION: "FP8 with all that gained",
    ArmName.WITHOUT_ADAPTERS: "FP8 without adapters",
    "as_is_compiled": "FP8 compiled",
}
"""Name of a variant -> what a user calls it; `variant` knows the others."""


def variant(name: str, fp8: bool) -> str:
    """Name a variant of the step; ``fp8`` says whether the job as it is trains in FP8."""
    if name in VARIANTS:
        return VARIANTS[name]
    if name == ArmName.AS_IS:
        return f"FP8 {AS_YOU_RUN_IT}" if fp8 else AS_YOU_RUN_IT
    if name == ArmName.PRESCRIBED:
        return "FP8 with all fixes"
    if is_conversion(name):
        way = "compiled your way" if keeps_users_compilation(name) else "compiled"
        return f"FP8 {recipe_in_words(recipe_of(name))} {way}"
    if changes_recipe(name):
        words = recipe_in_words(recipe_after(name))
        return words if "FP8" in words else f"FP8 {words}"
    if name in BY_TREATMENT:
        return f"FP8, {BY_TREATMENT[name].words}"
    change = in_words(name)
    return f"FP8, {change}" if fp8 else f"{AS_YOU_RUN_IT}, {change}"


def recipe_in_words(name: str) -> str:
    """Name a recipe as a user calls it."""
    return named(name).words or name


def variant_in_a_sentence(name: str) -> str:
    """Name a variant while it is worked on, where nothing but its name is at hand."""
    told = variant(name, fp8=False)
    return f"the step {told}" if told.startswith(AS_YOU_RUN_IT) else told
