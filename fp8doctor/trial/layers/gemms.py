"""The three GEMMs of a training Linear, in BF16 and in FP8.

Layouts are those of torchao 0.18 (``float8_linear.py``, ``float8_ops.py``) and Transformer Engine: the first
operand row-major, the second column-major, e4m3 by e4m3 forward, the gradient in the dtype of the recipe. A
gradient GEMM under rowwise scaling runs with the tensorwise kernel, as in torchao. The pass over its output
that follows is left out, because the compiler may fuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8doctor.facts import LayerShape, Layout
from fp8doctor.recipes import named
from fp8doctor.stacks import torch_private
from fp8doctor.trial.layers import casts

Operation = Callable[[], object]

LAYOUTS: tuple[Layout, ...] = ("output", "input_gradient", "weight_gradient")
"""What `bf16_gemms` and `fp8_gemms` compute, in their order."""

KEPT_IN_BF16 = "weight gradient, kept in bf16"
"""Name of the GEMM among those in FP8 that the recipe leaves in BF16."""


@dataclass(frozen=True)
class Operands:
    """What one Linear multiplies in a step: input (M, K), weight (N, K), output gradient (M, N)."""

    input: Tensor
    weight: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, shape: LayerShape, device: torch.device) -> Operands:
        generator = torch.Generator(device).manual_seed(0)
        sides = ((shape.m, shape.k), (shape.n, shape.k), (shape.m, shape.n))
        return cls(
            *(
                torch.empty(each, dtype=torch.bfloat16, device=device).normal_(generator=generator)
                for each in sides
            )
        )


def bf16_gemms(of: Operands, trained: bool) -> dict[str, Operation]:
    """Compute output, input gradient and weight gradient as a Linear does."""
    gemms: dict[str, Operation] = {
        "bf16 output": lambda: of.input @ of.weight.t(),
        "bf16 input gradient": lambda: of.gradient @ of.weight,
    }
    return gemms | {"bf16 weight gradient": lambda: of.gradient.t() @ of.input} if trained else gemms


def fp8_gemms(of: Operands, shape: LayerShape, fast: bool) -> dict[str, Operation]:
    """Compute the same in FP8.

    What a transposed copy holds does not change the time: it is the same memory read in another shape.
    """
    m, k, n = shape.m, shape.k, shape.n
    input, weight, gradient = (
        of.input.to(casts.E4M3),
        of.weight.to(casts.E4M3),
        of.gradient.to(casts.gradient_dtype(shape.recipe)),
    )
    one = torch.ones((), dtype=torch.float32, device=input.device)  # whatever the default dtype is
    rows, columns = (
        (torch.ones(side, dtype=torch.float32, device=input.device) for side in ((m, 1), (1, n)))
        if named(shape.recipe).granularity == "row"
        else (one, one)
    )
    gemms: dict[str, Operation] = {
        "fp8 output": lambda: scaled_mm(input, weight.t(), rows, columns, fast=fast),
        "fp8 input gradient": lambda: scaled_mm(gradient, weight.view(k, n).t(), one, one, fast=False),
    }
    if not shape.trained:
        return gemms
    if named(shape.recipe).weight_gradient_in_16_bits:
        return gemms | {KEPT_IN_BF16: lambda: of.gradient.t() @ of.input}
    return gemms | {
        "fp8 weight gradient": lambda: scaled_mm(
            gradient.view(n, m), input.view(k, m).t(), one, one, fast=False
        )
    }


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Tensor:
    """Run one FP8 GEMM with BF16 output, as torchao and plain torch call it (torch 2.6 to 2.13).

    ``fast`` accumulates with less precision.
    """
    product = torch_private.scaled_mm()
    assert product is not None
    result: Tensor = product(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return result
