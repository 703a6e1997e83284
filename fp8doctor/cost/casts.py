"""The time of the casts around the FP8 GEMMs of one Linear: bytes moved, or launches where there is little to
move.

Bytes are effective: the time at the bandwidth of a copy (`fp8doctor.gpus.MEMORY_EFFICIENCY`), so a
kernel that writes a transposed copy counts more than it moves. All of one H200, torch 2.11, torchao 0.18,
November 2026.
"""

from __future__ import annotations

from fp8doctor.cost.gemm import KERNEL_LAUNCH_MS
from fp8doctor.facts import Linear
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.recipes import STACKS, CastBytes, Recipe, default_recipe, named, stack_of

EAGER_CASTS = 2
"""Times each of input, weight and output gradient is cast in one step: once for each layout."""


EAGER_CAST_BYTES = CastBytes(62.0, 87.0)
"""Of one uncompiled torchao cast: 282.7 ms in a decoder of width 1024 (16384 tokens) and 589.1 in a Llama 8B
(4096 tokens), where most of what is cast are weights, whose transposed copies read along the wrong axis."""

MOST_ROWS_CAST_EAGERLY = 65_536
"""Rows up to which these bytes are taken to hold: they were measured with up to 16,384, and four times that
is a convention of this tool. With 1,048,576 rows of 256 features the transposed copy writes a mebibyte apart
and takes 110 bytes per element by itself: 24.8 ms of casts where these give 15.4 (h200-cast_heavy_layer)."""

COMPILED_CAST_KERNELS = 9
"""Extra kernels per compiled Float8Linear and step, counted (8.7 and 9.2)."""


def recipe_on(linear: Linear, gpu: GpuSpec) -> str | None:
    """Tell how a layer scales: by its record, and before its first forward by its stack's default.

    None for a layer that ran in BF16.
    """
    if linear.recipe is not None or linear.engaged is False or gpu.fp8_tflops is None:
        return linear.recipe
    return default_recipe(stack_of(linear), tuple(map(int, gpu.compute_capability.split("."))))


def layer_casts_ms(recipe: Recipe, m: int, k: int, n: int, gpu: GpuSpec, *, compiled: bool) -> float | None:
    """Model the casts of one layer in one step; None if those of its recipe were not measured."""
    if recipe.cast_bytes is None:
        return None
    if STACKS[recipe.stack].own_kernels:
        activation, weight = recipe.cast_bytes
        return memory_ms(activation * (m * k + m * n) + weight * k * n, gpu)
    return casts_ms(m, k, n, gpu, compiled=compiled, recipe=recipe.name)


def casts_ms(m: int, k: int, n: int, gpu: GpuSpec, *, compiled: bool, recipe: str = "tensorwise") -> float:
    """Model torchao's casts of one Linear in one step: input (M, K), weight (K, N), gradient (M, N).

    Uncompiled, what was measured of ``tensorwise`` stands for every recipe.
    """
    if not compiled:
        return memory_ms(
            EAGER_CASTS * (EAGER_CAST_BYTES.activation * (m * k + m * n) + EAGER_CAST_BYTES.weight * k * n),
            gpu,
        )
    bytes_moved = _bytes(recipe).activation * (m * k + m * n)
    return max(
        memory_ms(bytes_moved, gpu) + weight_casts_ms(k, n, gpu, recipe=recipe),
        COMPILED_CAST_KERNELS * KERNEL_LAUNCH_MS,
    )


def weight_casts_ms(k: int, n: int, gpu: GpuSpec, *, recipe: str = "tensorwise") -> float:
    """Model the part of the compiled casts that is the weight's and does not depend on the tokens."""
    return memory_ms(_bytes(recipe).weight * k * n, gpu)


def _bytes(recipe: str) -> CastBytes:
    known = named(recipe).cast_bytes
    assert known is not None, recipe
    return known
