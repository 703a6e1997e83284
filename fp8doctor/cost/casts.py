"""The time of the casts around the FP8 GEMMs of one Linear: bytes moved, or launches where there is little to
move.

Bytes are effective: the time at the bandwidth of a copy (`fp8doctor.gpus.MEMORY_EFFICIENCY`), so a
kernel that writes a transposed copy counts more than it moves. All of one H200, torch 2.11, torchao 0.18,
November 2026.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.cost.gemm import KERNEL_LAUNCH_MS
from fp8doctor.facts import Linear
from fp8doctor.gpus import GpuSpec, memory_ms

EAGER_CASTS = 2
"""Times each of input, weight and output gradient is cast in one step: once for each layout."""


class CastBytes(NamedTuple):
    """Bytes per element."""

    activation: float
    """Per element of input and of output gradient."""
    weight: float


EAGER_CAST_BYTES = CastBytes(62.0, 87.0)
"""Of one uncompiled torchao cast: 282.7 ms in a decoder of width 1024 (16384 tokens) and 589.1 in a Llama 8B
(4096 tokens), where most of what is cast are weights, whose transposed copies read along the wrong axis."""

MOST_ROWS_CAST_EAGERLY = 65_536
"""Rows up to which these bytes are taken to hold: they were measured with up to 16,384, and four times that
is a convention of this tool. With 1,048,576 rows of 256 features the transposed copy writes a mebibyte apart
and takes 110 bytes per element by itself: 24.8 ms of casts where these give 15.4 (h200-cast_heavy_layer)."""

COMPILED_CAST_BYTES = {
    "tensorwise": CastBytes(9.0, 17.0),
    "rowwise": CastBytes(25.0, 37.0),
    "rowwise_with_gw_hp": CastBytes(6.4, 25.0),
}
"""All casts of one step together by torchao's recipes, compiled, beside the kernels that they are fused with.
Counted in ``roofline_utils`` (0.18) they are 6 and 8, 8 and 10, 3 and 6. Timed alone (sweep, 4096 x 14336)
11.8 and 13.9, 16.2 and 18.5, 6.9 and 12.1; in a step fusion saves reads of activations, and weights are read
along the wrong axis. Measured in steps:

- tensorwise: kernel time of two compiled decoders beside that of their BF16 twins, all but GEMMs, attention
  and optimizer, 21.0 ms more at width 1024 and 10.0 at 4096. Profiled again in trials, 21.6 at width 1024 and
  47.6 in a Llama 8B (4096 tokens), where these give 20.9 and 49.8.
- rowwise: what a layer takes longer than with tensorwise, 2.24 ms in a Llama 8B (4096 tokens) and 5.43 in a
  70B (2048 tokens), scaling the gradients after their GEMM included.
- rowwise_with_gw_hp: a decoder of width 1024 takes 2.9 ms a step more than with tensorwise, although a third
  of its GEMMs stay in BF16. The weight is cast once as in tensorwise and once as in rowwise, and its gradient
  is not scaled: half way."""

COMPILED_CAST_KERNELS = 9
"""Extra kernels per compiled Float8Linear and step, counted (8.7 and 9.2)."""


TE_CAST_BYTES = {"delayed": 4.7, "current": 6.8}
"""Bytes per element of input, weight and output gradient: 0.435 and 0.638 ms at (16384, 4096, 16384)."""


TE_DEFAULT_RECIPE = {"8.9": "delayed", "9.0": "delayed", "12.0": "current", "12.1": "current"}
"""Compute capability -> the recipe that Transformer Engine's autocast takes when it is given none. Source:
``get_default_fp8_recipe`` in 2.20; on 10.x it is MXFP8, whose casts were not measured."""


def recipe_on(linear: Linear, gpu: GpuSpec) -> str | None:
    """Tell how a layer scales: by its record, and before Transformer Engine's first forward by its default.

    None for a layer of Transformer Engine that ran in BF16.
    """
    if linear.recipe is not None or linear.stack != "transformer_engine" or linear.engaged is False:
        return linear.recipe
    return TE_DEFAULT_RECIPE.get(gpu.compute_capability)


def casts_ms(m: int, k: int, n: int, gpu: GpuSpec, *, compiled: bool, recipe: str = "tensorwise") -> float:
    """Model torchao's casts of one Linear in one step: input (M, K), weight (K, N), gradient (M, N).

    Uncompiled, what was measured of ``tensorwise`` stands for every recipe.
    """
    if not compiled:
        return memory_ms(
            EAGER_CASTS * (EAGER_CAST_BYTES.activation * (m * k + m * n) + EAGER_CAST_BYTES.weight * k * n),
            gpu,
        )
    bytes_moved = COMPILED_CAST_BYTES[recipe].activation * (m * k + m * n)
    return max(
        memory_ms(bytes_moved, gpu) + weight_casts_ms(k, n, gpu, recipe=recipe),
        COMPILED_CAST_KERNELS * KERNEL_LAUNCH_MS,
    )


def weight_casts_ms(k: int, n: int, gpu: GpuSpec, *, recipe: str = "tensorwise") -> float:
    """Model the part of the compiled casts that is the weight's and does not depend on the tokens."""
    return memory_ms(COMPILED_CAST_BYTES[recipe].weight * k * n, gpu)
