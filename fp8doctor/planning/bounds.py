"""An upper bound of FP8's speedup on GPUs for which no table has the times of matmuls and casts.

It counts FLOPs, not times. All reach the same share of the datasheet's rate, which is higher for the matmuls
of a recipe. Casts do not lower the bound: the slower the matmuls are, the less of the step is the time of the
casts' bytes, and how slow they are is unknown.
"""

from __future__ import annotations

from fp8doctor.cost.gemm import amdahl
from fp8doctor.cost.step_cost import attention_flops
from fp8doctor.gpus import AmdSpec
from fp8doctor.planning.converted import gathers_fp8, is_converted
from fp8doctor.planning.job_options import OPTIMIZERS, Options
from fp8doctor.planning.share import Share
from fp8doctor.planning.step_time import RECOMPUTED, as_checkpointed
from fp8doctor.recipes import Recipe


def speedup_bound(share: Share, options: Options, gpu: AmdSpec, recipe: Recipe) -> float:
    """Return how many times as fast as BF16 a step is at most, which computes or waits for links."""
    in_fp8 = parameters = 0.0
    attention = attention_flops(as_checkpointed(share, options))
    whole = sum(flops for flops, _, _ in attention) / options.tp / options.pp
    for layer in share.layers:
        linear = layer.linear
        one = 2.0 * layer.count * layer.rows * linear.in_features * linear.out_features
        one *= 1 if linear.role == "experts" else linear.get("gemms", 1)
        again = 0.0 if linear.role == "head" else RECOMPUTED[options.checkpointing]
        trained = linear.requires_grad is not False
        whole += (2 + trained + again) * one
        if is_converted(layer, recipe):
            in_fp8 += (2 + (trained and not recipe.weight_gradient_in_16_bits) + again) * one
            parameters += layer.parameters * layer.count
    bound = amdahl(in_fp8 / whole, gpu.fp8_tflops / gpu.bf16_tflops)
    if gathers_fp8(recipe, options):
        moved = 4.0 * share.parameters.all + OPTIMIZERS[options.optimizer].gradient * share.trained.all
        bound = max(bound, moved / (moved - 2.0 * parameters))
    return bound
