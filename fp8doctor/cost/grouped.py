"""Routed experts: matmuls with equal shares of the rows, and the casts around them.

Transformer Engine multiplies one expert after another, torch all of them in one kernel; both are modelled as
other matmuls are, but for torch's on Blackwell, whose times are published. Bytes are effective, as in
`fp8doctor.cost.cast_cost`. Errors: research/benchmarks/results/grouped_h200.md.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from fp8doctor.cost.cast_cost import layer_casts_ms
from fp8doctor.cost.gemm import KERNEL_LAUNCH_MS
from fp8doctor.cost.matmul_counts import gemms, rows_seen, step_tokens
from fp8doctor.facts import Facts, Linear
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.recipes import TRANSFORMER_ENGINE, Recipe, recipe_of, stack_of

BF16_EFFICIENCY = 0.36
"""Share of the BF16 peak of a B200 that `torch._grouped_mm` reaches: 0.34 to 0.42, seven shapes of 128,000
rows and 2 to 8 experts. Source: torchao 0.14, ``prototype/moe_training/README.md``."""

MXFP8_EFFICIENCY = (0.465, 0.465, 0.354)
"""Share of the FP8 peak that the grouped matmuls of MXFP8 reach, for output, input and weight gradient:
1.838, 1.838 and 2.412 ms for 131,072 rows and 8 experts of 7168 x 2048. Source: the same file in 0.15, a
B200."""

EXPERTS_PER_LAUNCH = 8
"""Experts of a ``te.GroupedLinear`` that take the host as long as another te.Linear: 6.1 and 12.9 ms for 64
and 128 in BF16, 11.3 and 28.4 in delayed scaling, where a te.Linear takes 0.7 and 1.2. One H200,
research/benchmarks/measured/h200_grouped.json.gz."""


class GroupedCost(NamedTuple):
    """Times of one expert weight in one micro-batch, in ms."""

    bf16_ms: float
    fp8_ms: float
    casts_ms: float


def mxfp8_experts(linear: Linear, facts: Facts, gpu: GpuSpec) -> GroupedCost | None:
    """Model the trained experts of a 3-D weight in MXFP8.

    None for other layers, on GPUs without MXFP8, and if the rows are unknown.
    """
    if (
        linear.role != "experts"
        or (casts := recipe_of(linear)).name != "mxfp8"
        or linear.requires_grad is False
        or linear.features.get("emulate")
        or not gpu.compute_capability.startswith("10.")
        or not gpu.fp8_tflops
    ):
        return None
    rows = routed_rows(linear, facts)
    if not rows:
        return None
    k, n, experts = linear.in_features, linear.out_features, gemms(linear)
    return GroupedCost(
        sum(published_ms(rows, k, n, gpu, None) or ()),
        sum(published_ms(rows, k, n, gpu, casts) or ()),
        grouped_casts_ms(casts, rows, k, n, experts, gpu),
    )


def is_grouped(linear: Linear) -> bool:
    """Return whether one weight is of several experts."""
    return linear.get("role") == "experts" and gemms(linear) > 1


def rows_of_one(linear: Linear, rows: int) -> int:
    """Divide the rows of a weight among its experts."""
    return ceil(rows / gemms(linear)) if is_grouped(linear) else rows


def casts_of(linear: Linear, recipe: Recipe, rows: int, gpu: GpuSpec, *, compiled: bool) -> float | None:
    """Model the casts around a layer, or around one of its experts; None without numbers."""
    k, n = linear.in_features, linear.out_features
    if not is_grouped(linear):
        return layer_casts_ms(recipe, rows, k, n, gpu, compiled=compiled)
    if recipe.grouped_cast_bytes is not None:
        return grouped_casts_ms(recipe, rows, k, n, 1, gpu)
    stack = stack_of(linear)
    casts = layer_casts_ms(recipe, rows, k, n, gpu, compiled=True) if stack.own_kernels else None
    return casts and casts + stack.compiled.kernels * KERNEL_LAUNCH_MS


def in_one_kernel(linear: Linear) -> int:
    """Return how many experts one kernel multiplies: all, or one in Transformer Engine."""
    te = TRANSFORMER_ENGINE.name in (linear.get("stack"), linear.get("kind", "").partition(".")[0])
    return gemms(linear) if is_grouped(linear) and not te else 1


def launches(linear: Linear, share: float = 1.0) -> float:
    """Return the host's time for all matmuls of a layer / that for one Linear, in one call.

    ``share`` of the experts' launches are made: in FP8 those are the casts of weights, which may be kept.
    """
    if not is_grouped(linear):
        return gemms(linear)
    return 1.0 if in_one_kernel(linear) > 1 else 1.0 + share * gemms(linear) / EXPERTS_PER_LAUNCH


def published_ms(rows: int, k: int, n: int, gpu: GpuSpec, recipe: Recipe | None) -> list[float] | None:
    """Model output, input gradient and weight gradient on Blackwell, with a recipe or in BF16."""
    one = 2.0 * rows * k * n / 1e9
    if recipe is None:
        return [one / (gpu.bf16_tflops * BF16_EFFICIENCY)] * 3
    if recipe.name != "mxfp8" or not gpu.fp8_tflops:
        return None
    return [one / (gpu.fp8_tflops * each) for each in MXFP8_EFFICIENCY]


def grouped_casts_ms(recipe: Recipe, rows: int, k: int, n: int, experts: int, gpu: GpuSpec) -> float:
    """Model the casts around one expert weight in one micro-batch."""
    elements = rows * (k + n) + experts * k * n
    return memory_ms((recipe.grouped_cast_bytes or 0.0) * elements, gpu) + recipe.grouped_scales_ms * rows


def routed_rows(linear: Linear, facts: Facts) -> int | None:
    """Count the rows of all experts of a weight: as seen, else tokens times visits.

    None if neither is known.
    """
    if seen := rows_seen(linear, facts):
        return sum(seen)
    tokens, flops = step_tokens(facts), float(linear.get("flops_per_token") or 0)
    if not tokens or not flops:
        return None
    products = 3 if linear.requires_grad is not False else 2
    return round(tokens * flops / (2.0 * products * linear.in_features * linear.out_features))
