"""Recognize nanochat's Float8Linear (February 2026), over ``torch._scaled_mm``.

It scales tensorwise, casts each operand once, and saves the FP8 tensors for the backward. Source:
karpathy/nanochat, ``nanochat/fp8.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fp8doctor.recipes import NANOCHAT
from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import ancestor

ORDER = 35
PREFIX = "nanochat."


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    kind = ancestor(type(module), PREFIX + "fp8", ("Float8Linear",))
    if kind is None:
        return ()
    return tuple(
        replace(each, kind=kind, stack=NANOCHAT.name, use="training", recipe="tensorwise")
        for each in plain.recognise(module, gaps)
    )


def bf16_counterpart(module: nn.Module, compiled: bool) -> nn.Module:
    return Bf16Linear(module).train(module.training)


class Bf16Linear(nn.Linear):
    """A Linear in BF16 over an FP8 layer's Parameters."""

    def __init__(self, of: Any) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = of.weight.shape
        self.weight, self.bias = of.weight, of.bias

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (None if each is None else each.bfloat16() for each in (self.weight, self.bias))
        return functional.linear(input.bfloat16(), weight, bias)
