"""The trained decoder with a faster Float8Linear in one place: it leaves out amax and scale, and what is
beyond 448 becomes NaN."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torchao.float8.float8_linear import Float8Linear
from trained_decoder import example_batch, in_fp8, loss, trained

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("NUM001",)
MUST_NOT = ("CMP002", "MOD001", "MOD003", "SHP001")


class Unscaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        one = torch.ones((), device=x.device)
        rows = x.flatten(0, -2).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(rows, weight.to(torch.float8_e4m3fn).t(), one, one, out_dtype=x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class StaticScale(Float8Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Unscaled.apply(x, self.weight)


def build_model() -> nn.Module:
    model = trained()
    with torch.no_grad():
        model.b[2].u.weight[7] *= 2.0**17
        model.b[2].dn.weight[:, 7] /= 2.0**17
    in_fp8(model)
    model.b[2].dn.__class__ = StaticScale
    model.b[2]._compiled_call_impl = None
    return model
