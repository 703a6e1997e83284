"""Experts in MXFP8: grouped matmuls that it speeds up, and casts around them.

Bytes are effective, as in `fp8doctor.cost.cast_cost`. All of it is published for one GPU, a B200.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.cost.matmul_counts import gemms, rows_seen, step_tokens
from fp8doctor.facts import Facts, Linear
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.recipes import Recipe, recipe_of

BF16_EFFICIENCY = 0.36
"""Share of the BF16 peak of a B200 that `torch._grouped_mm` reaches: 0.34 to 0.42, seven shapes of 128,000
rows and 2 to 8 experts. Source: torchao 0.14, ``prototype/moe_training/README.md``."""

MXFP8_EFFICIENCY = (0.465, 0.465, 0.354)
"""Share of the FP8 peak that the grouped matmuls of MXFP8 reach, for output, input and weight gradient:
1.838, 1.838 and 2.412 ms for 131,072 rows and 8 experts of 7168 x 2048. Source: the same file in 0.15, a
B200."""


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
        or (casts := recipe_of(linear)).grouped_cast_bytes is None
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
    one = 2.0 * rows * k * n / 1e9
    return GroupedCost(
        3 * one / (gpu.bf16_tflops * BF16_EFFICIENCY),
        sum(one / (gpu.fp8_tflops * efficiency) for efficiency in MXFP8_EFFICIENCY),
        grouped_casts_ms(casts, rows, k, n, experts, gpu),
    )


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
