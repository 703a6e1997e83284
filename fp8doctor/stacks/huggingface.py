"""Recognize FP8 weights that transformers stores.

The forward may run in FP8. The backward dequantizes to BF16 (5.22 to 5.23); earlier FP8Linears have none.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import ancestor, is_a

ORDER = 30
STACK = "huggingface"
PREFIX = "transformers.integrations."

LINEARS = ("FP8Linear", "FP8GroupedLinear", "FbgemmFp8Linear")
EXPERTS = ("FP8Experts", "FP8Expert", "FbgemmFp8Llama4TextExperts")


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    kind = ancestor(type(module), PREFIX, LINEARS + EXPERTS)
    if kind is None:
        return ()
    layers = plain.linear(module, gaps) if is_a(module, nn.Linear) else plain.experts(module)
    return tuple(replace(each, kind=kind, stack=STACK) for each in layers)
