"""A stand-in for nanochat's own FP8 layer, written anew with the calls of its source.

karpathy/nanochat, nanochat/fp8.py as of March 2026 (commit 1076f97), MIT License, copyright 2025 Andrej
Karpathy: one autograd function that casts each operand once and multiplies by ``torch._scaled_mm``.
"""

from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale the largest magnitude to the largest value of the dtype; return the inverse scale too."""
    most = torch.finfo(dtype).max
    scale = (most / x.detach().float().abs().max().double().clamp(min=1e-12)).float()
    return (x.detach().float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@torch._dynamo.allow_in_graph
class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_inverse), (weight8, weight_inverse) = cast(x, E4M3), cast(weight, E4M3)
        ctx.save_for_backward(x8, x_inverse, weight8, weight_inverse)
        return torch._scaled_mm(
            x8, weight8.t(), x_inverse, weight_inverse, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x8, x_inverse, weight8, weight_inverse = ctx.saved_tensors
        gradient8, inverse = cast(gradient, E5M2)
        of_x = torch._scaled_mm(
            gradient8, column_major(weight8), inverse, weight_inverse, out_dtype=gradient.dtype
        )
        of_weight = torch._scaled_mm(
            gradient8.t().contiguous(), column_major(x8), inverse, x_inverse, out_dtype=gradient.dtype
        )
        return of_x, of_weight


class Float8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        input = input.to(torch.bfloat16)
        output = Matmul.apply(input.reshape(-1, input.shape[-1]), self.weight)
        output = output.reshape(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)


Float8Linear.__module__ = "nanochat.fp8"


def convert_to_float8_training(model: nn.Module) -> nn.Module:
    """Put every nn.Linear in FP8, over its own weight and bias."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear
    return model
