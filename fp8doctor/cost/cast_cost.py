"""The time of one Linear's casts: bytes moved at the bandwidth of a copy, or launches if those are few.

Measured on one H200, torch 2.11, torchao 0.18, November 2026."""

from __future__ import annotations

from fp8doctor.cost.gemm import KERNEL_LAUNCH_MS
from fp8doctor.cost.matmul_counts import is_grouped
from fp8doctor.facts import Linear
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.recipes import STACKS, Recipe, default_recipe, recipe_of, runs_on, stack_of


def recipe_on(linear: Linear, gpu: GpuSpec) -> str | None:
    """Return how a layer scales, by its record, else by its stack's default.

    None for a layer that ran in BF16.
    """
    if linear.recipe is not None or linear.engaged is False or gpu.fp8_tflops is None:
        return linear.recipe
    return default_recipe(stack_of(linear), capability_of(gpu))


def capability_of(gpu: GpuSpec) -> tuple[int, ...]:
    return tuple(map(int, gpu.compute_capability.split(".")))


def is_known(linear: Linear, gpu: GpuSpec | None) -> bool:
    """Return whether an FP8 layer's casts were measured on a GPU for its recipe."""
    recipe = recipe_of(linear)
    return recipe.cast_bytes is not None and (
        gpu is None or not gpu.fp8_tflops or runs_on(recipe, capability_of(gpu))
    )


def layer_casts_ms(
    recipe: Recipe, m: float, k: int, n: int, gpu: GpuSpec, *, compiled: bool, weights: float = 1.0
) -> float | None:
    """Model the casts of one layer in one step; None if its recipe was not measured.

    They are of input (M, K), weight (K, N) and gradient (M, N), or of a share of the weight. Uncompiled, the
    measurement of the stack's first recipe stands for all.
    """
    stack = STACKS.get(recipe.stack)
    if recipe.cast_bytes is None or stack is None or (recipe.only_compiled and not compiled):
        return None
    if gpu.fp8_tflops and not runs_on(recipe, capability_of(gpu)):
        return None
    each = recipe.cast_bytes if compiled or stack.own_kernels else stack.eager_cast_bytes
    if each is None:
        return None
    moving = memory_ms(each.activation * m * (k + n) + each.weight * weights * k * n, gpu)
    least = stack.compiled.kernels * KERNEL_LAUNCH_MS if compiled and not stack.own_kernels else 0.0
    return max(moving, least)


def casts_of(
    linear: Linear, recipe: Recipe, rows: int, gpu: GpuSpec, *, compiled: bool = True, weights: float = 1.0
) -> float | None:
    """Model the casts around a layer, or around one of its experts; None without numbers.

    Nothing is cast for the weight gradient of a frozen layer, unless its stack computes it in vain.
    """
    k, n = linear.in_features, linear.out_features
    in_vain = not compiled and stack_of(linear).frozen_gradient
    m = rows * recipe.frozen_cast_share if linear.requires_grad is False and not in_vain else rows
    if not is_grouped(linear):
        return layer_casts_ms(recipe, m, k, n, gpu, compiled=compiled, weights=weights)
    if recipe.grouped_cast_bytes is not None:
        moving = memory_ms(recipe.grouped_cast_bytes * (m * (k + n) + weights * k * n), gpu)
        return moving + recipe.grouped_scales_ms * rows
    stack = stack_of(linear)
    if not stack.own_kernels:
        return None
    casts = layer_casts_ms(recipe, m, k, n, gpu, compiled=True, weights=weights)
    return casts and casts + stack.compiled.kernels * KERNEL_LAUNCH_MS
