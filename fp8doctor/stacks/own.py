"""Recognize FP8 layers that a user wrote, by their forward's code or their names.

A forward that reaches torch's FP8 matmul trains in FP8. The use is unknown if it calls a matmul named after
FP8, if the class or its weight's type is named after FP8, or if an FP8 switch is on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn import functional

from fp8doctor.facts import Use
from fp8doctor.stacks import Layer, NoCounterpart, plain
from fp8doctor.stacks.code_names import is_own, named, names_in
from fp8doctor.stacks.looking import (
    forward_of,
    is_a,
    lineage,
    parameters_of,
    read,
    read_class,
    state_of,
    tensor,
)
from fp8doctor.stacks.tensors import is_float8, local, stored, subclass
from fp8doctor.stacks.torch_private import FAKE_TENSOR

ORDER = 90
STACK = "own"

OF_TORCH = (
    *("_scaled_mm", "_scaled_mm_v2", "scaled_mm"),
    *("_scaled_grouped_mm", "_scaled_grouped_mm_v2", "scaled_grouped_mm"),
)
"""torch's FP8 matmuls (2.1 to 2.11)."""

GEMM = re.compile(
    r"(fp8|float8).*(gemm|matmul|(?<![a-z])mm(?![a-z]))|(gemm|matmul|(?<![a-z])mm(?![a-z])).*(fp8|float8)",
    re.IGNORECASE,
)
"""Names of other FP8 matmuls: ``fp8_gemm`` in DeepSeek-V3, ``fp8_gemm_nt`` in DeepGEMM."""

NARROW = "(fp8|float8|mxfp8|mxfp4|nvfp4)"
OUTSIDE = re.compile(
    rf"{NARROW}.*(attn|attention|dpa|(?<![a-z])mm(?![a-z]))|(attn|attention|(?<![a-z])mm(?![a-z])).*{NARROW}|"
    "f8f8bf16",
    re.IGNORECASE,
)
"""Names of FP8 functions that belong to no layer: attention, grouped matmuls, MSLK's ``f8f8bf16_rowwise``."""

NAMED = re.compile(r"fp8|float8", re.IGNORECASE)
SWITCH = re.compile(
    r"_?((use|enable|is|with|in)_)?(fp8|float8)(_(enabled|training|matmul|linear))?", re.IGNORECASE
)
"""Attributes that switch FP8 on: ``use_fp8`` in modded-nanogpt."""

GETS_BY = ("pad", "linear", "forward")
"""Names in a layer that pads its sides, or falls back to an ordinary matmul."""

_REACHED: WeakKeyDictionary[FunctionType, tuple[str, ...]] = WeakKeyDictionary()
"""Names in a forward and in the user's functions that it calls."""


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Recognize a layer with 16- or 32-bit weights whose forward or name is FP8's."""
    weights = [each for each in parameters_of(module).values() if each is not None and each.ndim in (2, 3)]
    forward = _function(forward_of(module))
    if not weights or forward is None or any(map(_is_quantized, weights)):
        return ()
    switches = _switches(module, forward)
    if switches == {False}:
        return ()
    names = names_reached(forward, type(module))
    gemm = fp8_gemm(names)
    called = f"{type(module).__name__} {read(read(module, 'weight_qtype'), 'name')}"  # the latter is quanto's
    if gemm is None and True not in switches and not NAMED.search(called):
        return ()
    use: Use = "training" if gemm and gemm.startswith("torch.") else "unknown"
    features: dict[str, bool | int | str | None] = {"gemm": gemm}
    features["any_side"] = not set(names).isdisjoint(GETS_BY)
    return tuple(
        replace(each, stack=STACK, use=use, features=each.features | features)
        for each in _layers(module, gaps)
    )


def bf16_counterpart(module: nn.Module, compiled: bool) -> nn.Module:
    """Make an nn.Linear of a subclass of it; other layers have no known form."""
    weight = tensor(module, "weight")
    if not is_a(module, nn.Linear) or weight is None or weight.ndim != 2:
        raise NoCounterpart(f"{type(module).__name__} is a class of the user's own, and no nn.Linear")
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


def fp8_gemm(names: tuple[str, ...]) -> str | None:
    """Return the FP8 matmul among a forward's names, or None."""
    of_torch = next((f"torch.{each}" for each in names if each in OF_TORCH), None)
    return of_torch or next((each for each in names if GEMM.search(each)), None)


def fp8_call(module: nn.Module) -> str | None:
    """Return the FP8 function that a module's forward names, or a function that it holds names."""
    forward = _function(forward_of(module))
    if forward is None:
        name = type(module).__name__  # torchao's wrapper, which axolotl's attn_implementation: fp8 uses
        return name if OUTSIDE.search(name) else None
    if _switches(module, forward) == {False}:
        return None
    names = names_reached(forward, type(module))
    for function in (_function(read(module, name)) for name in names_in(forward.__code__)):
        if function is not None:
            names += (function.__name__, *names_reached(function, type(module)))
    return fp8_gemm(names) or next((each for each in names if OUTSIDE.search(each)), None)


def _switches(module: nn.Module, forward: FunctionType) -> set[bool]:
    """Return the values of the FP8 switches that a forward reads."""
    values = (read(module, name) for name in names_in(forward.__code__) if SWITCH.fullmatch(name))
    return {each for each in values if type(each) is bool}


def names_reached(function: FunctionType, kind: type) -> tuple[str, ...]:
    """List the names in a class's forward and in the user's functions that it calls."""
    if function not in _REACHED:
        _REACHED[function] = tuple(_reached(function, kind, set()))
    return _REACHED[function]


def _reached(function: Any, kind: type, seen: set[int]) -> Iterator[str]:
    yield from names_in(function.__code__)
    for name, value in named(function, kind.__mro__, seen):
        yield name
        ways: tuple[Any, ...] = ()
        if isinstance(value, type) and ("torch.autograd.function", "Function") in lineage(value):
            ways = (read_class(value, "forward"), read_class(value, "backward"))
        elif type(value).__name__ == "CustomOpDef":
            ways = (state_of(value).get("_init_fn"),)
        for way in filter(None, map(_function, ways)):
            yield from _reached(way, kind, seen)


def _function(value: Any) -> FunctionType | None:
    """Return the user's own function in a method or function; None for a library's."""
    value = value.__func__ if type(value) in (MethodType, staticmethod, classmethod) else value
    return value if is_own(value) else None


def _is_quantized(weight: Tensor) -> bool:
    inside = subclass(local(weight))
    return is_float8(stored(weight)) or inside not in (None, FAKE_TENSOR) or not weight.is_floating_point()


def _layers(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe the module as an ordinary layer, or by its matrix ``weight``."""
    if known := plain.recognise(module, gaps):
        return known
    weight = tensor(module, "weight")
    if weight is None or weight.ndim != 2:
        return ()
    return (plain.layer(module, (weight,), weight.shape[1], weight.shape[0]),)
