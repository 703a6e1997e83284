"""An arm in a user's words, while it is worked on: which of them will be a fix is not known yet."""

from __future__ import annotations

from fp8doctor.analysis.te_recipes import TE_RECIPES
from fp8doctor.facts.arm_names import ArmName, is_conversion, recipe_of

RECIPE = "recipe-"
"""How the names of arms begin that try another recipe of torchao."""

NAMED: dict[str, str] = {
    ArmName.AS_IS: "the step as it is",
    ArmName.BF16: "BF16",
    ArmName.BF16_COMPILED: "BF16, compiled",
    ArmName.BF16_AS_COMPILED: "BF16, compiled as the job is",
    ArmName.BF16_WITHOUT_CHECKPOINTING: "BF16 without checkpointing",
    ArmName.SELF_CHECK: "a copy to check the timing against",
    ArmName.PRESCRIBED: "FP8 with all fixes",
    ArmName.PRESCRIBED_AS_COMPILED: "FP8 with all fixes, compiled as the job is",
    ArmName.COMBINATION: "what gained, together",
    ArmName.WITHOUT_ADAPTERS: "the step without adapters",
}


def arm_in_words(name: str) -> str:
    """Name an arm for people."""
    if name in NAMED:
        return NAMED[name]
    if is_conversion(name):
        return f"FP8 ({recipe_of(name)})"
    if name in TE_RECIPES:
        return f"FP8, {TE_RECIPES[name].words}"
    if name.startswith(RECIPE):
        return f"FP8 with the recipe {name.removeprefix(RECIPE)}"
    return name.replace("_", " ").replace("-", " ")
