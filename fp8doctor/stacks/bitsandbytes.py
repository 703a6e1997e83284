"""bitsandbytes: 8-bit and 4-bit weights, dequantised for 16-bit GEMMs or multiplied in INT8, never FP8."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.lineage import ancestor
from fp8doctor.stacks.looking import is_a

ORDER = 40
STACK = "bitsandbytes"
PREFIX = "bitsandbytes."


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """A Linear4bit or Linear8bitLt, by the features it was built with: its weight is packed."""
    kind = ancestor(type(module), PREFIX, ("Linear4bit", "Linear8bitLt"))
    if kind is None or not is_a(module, nn.Linear):
        return ()
    return tuple(replace(each, kind=kind, stack=STACK, use="storage") for each in plain.linear(module, gaps))
