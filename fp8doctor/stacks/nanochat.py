"""Recognize nanochat's Float8Linear (February 2026), over ``torch._scaled_mm``.

It scales tensorwise, casts each operand once, and saves the FP8 tensors for the backward. Later versions use
a function that `fp8doctor.stacks.own` finds. Source: karpathy/nanochat, ``nanochat/fp8.py``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fp8doctor.recipes import NANOCHAT
from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import ancestor
from fp8doctor.stacks.own import bf16_counterpart as bf16_counterpart

ORDER = 35
PREFIX = "nanochat."


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe nanochat's Float8Linear, which always scales tensorwise."""
    kind = ancestor(type(module), PREFIX + "fp8", ("Float8Linear",))
    if kind is None:
        return ()
    return tuple(
        replace(each, kind=kind, stack=NANOCHAT.name, use="training", recipe="tensorwise")
        for each in plain.recognise(module, gaps)
    )
