"""Transformer Engine's FP8 recipes as treatments: their classes, words, and where they may run."""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.analysis.capability import capability
from fp8doctor.analysis.recipe_needs import needs, unmet
from fp8doctor.facts import Facts, recorded

STACK = "transformer_engine"


class TeRecipe(NamedTuple):
    """One recipe of ``transformer_engine.common.recipe``."""

    kind: str
    """Name of its class."""
    recipe: str
    """As `Linear.recipe` has it."""
    words: str


TE_RECIPES = {
    "te-delayed": TeRecipe("DelayedScaling", "delayed", "delayed scaling"),
    "te-current": TeRecipe("Float8CurrentScaling", "current", "current scaling"),
    "te-block": TeRecipe("Float8BlockScaling", "blockwise", "block scaling"),
    "te-mxfp8": TeRecipe("MXFP8BlockScaling", "mxfp8", "MXFP8 block scaling"),
}
"""Name of the treatment -> the recipe."""

FIRST_WITH_MXFP8 = (10, 0)
FIRST_WITHOUT_MXFP8 = (12, 0)
"""Compute capabilities from which on, and from which on no more, MXFP8 is the default. Source:
``get_default_fp8_recipe`` in Transformer Engine 2.20, which takes current scaling from the second on."""


def default_recipe(facts: Facts) -> str:
    """Tell which recipe an autocast takes that is given none."""
    have = max((capability(gpu) for gpu in facts.gpus if gpu.visible), default=(0, 0))
    if have >= FIRST_WITHOUT_MXFP8:
        return "current"
    return "mxfp8" if have >= FIRST_WITH_MXFP8 else "delayed"


def own_recipes(facts: Facts, opened: bool) -> set[str]:
    """List the recipes that the layers ran with; the default where none ran and an autocast is to be
    ``opened``."""
    layers = [each for each in facts.network.linears if each.stack == STACK and each.use == "training"]
    ran = {each.recipe for each in layers if recorded(each, "recipe") and each.recipe}
    return ran or ({default_recipe(facts)} if layers and opened else set())


def is_legal(name: str, facts: Facts) -> bool:
    """Whether nothing that is known of the first visible GPU and of CUDA speaks against the recipe of this
    treatment."""
    recipe = TE_RECIPES[name].recipe
    gpu = next((gpu for gpu in facts.gpus if gpu.visible and gpu.vendor == "nvidia"), None)
    return gpu is not None and unmet(STACK, recipe, needs(STACK, recipe), gpu, facts) is None
