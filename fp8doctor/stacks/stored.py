"""Recognize weights that a library stores in low precision: FP8 of transformers, 4 or 8 bits of bitsandbytes.

transformers' forward may run in FP8. Its backward dequantizes to BF16 (5.22 to 5.23); earlier FP8Linears have
none. bitsandbytes never runs in FP8, and its packed weight has no shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import ancestor, is_a

ORDER = 30

LINEARS = ("FP8Linear", "FP8GroupedLinear", "FbgemmFp8Linear")
EXPERTS = ("FP8Experts", "FP8Expert", "FbgemmFp8Llama4TextExperts")
FEW_BITS = ("Linear4bit", "Linear8bitLt")

STORED: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("transformers.integrations.", LINEARS + EXPERTS, {"stack": "huggingface"}),
    ("bitsandbytes.", FEW_BITS, {"stack": "bitsandbytes", "use": "storage"}),
)
"""Packages, their classes, and what differs from a plain layer."""

PREFIX = tuple(prefix for prefix, _, _ in STORED)


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    for prefix, names, known in STORED:
        if (kind := ancestor(type(module), prefix, names)) is not None:
            layers = plain.linear(module, gaps) if is_a(module, nn.Linear) else plain.experts(module)
            return tuple(replace(each, kind=kind, **known) for each in layers)
    return ()
