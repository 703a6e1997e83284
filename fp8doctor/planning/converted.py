"""Which layers a recipe converts, and how their weights travel."""

from __future__ import annotations

from fp8doctor.analysis.layers import FP8_MULTIPLE, would_be_converted
from fp8doctor.planning.job_options import Options
from fp8doctor.planning.share import Layer, Share
from fp8doctor.recipes import STACKS, Recipe


def is_converted(layer: Layer, recipe: Recipe | None) -> bool:
    """Return whether a conversion with this recipe takes the layer."""
    linear = layer.linear
    if recipe is None:
        return False
    if linear.role == "experts":  # torchao's converter leaves them out, and rowwise experts are slower
        taken = STACKS[recipe.stack].own_kernels or recipe.name == "mxfp8"
    else:
        taken = would_be_converted(linear) and layer.rows % FP8_MULTIPLE == 0
    return taken and linear.in_features % recipe.multiple == 0 and linear.out_features % recipe.multiple == 0


def converts_any(share: Share, recipe: Recipe) -> bool:
    """Return whether a conversion with this recipe takes any layer."""
    return any(is_converted(each, recipe) for each in share.layers)


def gathers_fp8(recipe: Recipe | None, options: Options) -> bool:
    """Return whether FSDP gathers weights in FP8: ``enable_fsdp_float8_all_gather`` of torchao."""
    sharded = options.sharding == "fsdp" and options.ranks > 1
    return sharded and recipe is not None and (recipe.stack, recipe.name) == ("torchao", "tensorwise")


def weights_cast(recipe: Recipe, options: Options) -> float:
    """Return the share of its weights that a GPU casts in one micro-batch.

    A sharded gather in FP8 leaves each rank its part. Transformer Engine keeps the cast weights of the first
    micro-batch for the others, if ``is_first_microbatch`` says which it is, as Megatron does.
    """
    if gathers_fp8(recipe, options):
        return 1 / options.ranks
    return 1 / options.accumulate if STACKS[recipe.stack].keeps_copies else 1.0
