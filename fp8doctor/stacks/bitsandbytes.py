"""Recognize bitsandbytes' 8-bit and 4-bit weights, which never run in FP8."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import ancestor, is_a

ORDER = 40
STACK = "bitsandbytes"
PREFIX = "bitsandbytes."


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe a Linear4bit or Linear8bitLt; its packed weight has no shape."""
    kind = ancestor(type(module), PREFIX, ("Linear4bit", "Linear8bitLt"))
    if kind is None or not is_a(module, nn.Linear):
        return ()
    return tuple(replace(each, kind=kind, stack=STACK, use="storage") for each in plain.linear(module, gaps))
