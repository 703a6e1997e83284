"""nanochat's own Float8Linear (from February 2026), an nn.Linear over ``torch._scaled_mm``.

It scales tensorwise, casts each operand once, and saves the FP8 tensors for the backward. Later versions
multiply by a function, which `fp8doctor.stacks.own` finds. Source: karpathy/nanochat, ``nanochat/fp8.py``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fp8doctor.recipes import NANOCHAT
from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.lineage import ancestor
from fp8doctor.stacks.own import bf16_twin as bf16_twin

ORDER = 35
PREFIX = "nanochat."


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe a Float8Linear of nanochat's, whose one recipe is tensorwise."""
    kind = ancestor(type(module), PREFIX + "fp8", ("Float8Linear",))
    if kind is None:
        return ()
    return tuple(
        replace(each, kind=kind, stack=NANOCHAT.name, use="training", recipe="tensorwise")
        for each in plain.recognise(module, gaps)
    )
