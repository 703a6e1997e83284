"""Notice what a user's classes call FP8: whether it runs, only a step shows."""

import re
from dataclasses import replace

from torch import Tensor, nn

from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import LIBRARIES, home, parameters_of, read, state_of, tensor
from fp8doctor.stacks.tensors import is_float8, local, stored, subclass
from fp8doctor.stacks.torch_private import FAKE_TENSOR

ORDER = 90
STACK = "own"

NAMED = re.compile(r"fp8|float8", re.IGNORECASE)
SWITCH = re.compile(
    r"_?((use|enable|is|with|in)_)?(fp8|float8)(_(enabled|training|matmul|linear))?", re.IGNORECASE
)
"""Attributes that switch FP8 on: ``use_fp8`` in modded-nanogpt."""


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe a layer with 16- or 32-bit weights whose class, weight type or switch says FP8."""
    weights = [each for each in parameters_of(module).values() if each is not None and each.ndim in (2, 3)]
    if not weights or any(map(_is_quantized, weights)) or home(type(module)).partition(".")[0] in LIBRARIES:
        return ()
    switches = {value for name, value in state_of(module).items() if SWITCH.fullmatch(name)}
    called = f"{type(module).__name__} {read(read(module, 'weight_qtype'), 'name')}"  # the latter is quanto's
    if True not in switches and (False in switches or not NAMED.search(called)):
        return ()
    layers, weight = plain.recognise(module, gaps), tensor(module, "weight")
    if not layers and weight is not None and weight.ndim == 2:
        layers = (plain.layer(module, (weight,), weight.shape[1], weight.shape[0]),)
    return tuple(replace(each, stack=STACK, use="unknown") for each in layers)


def _is_quantized(weight: Tensor) -> bool:
    inside = subclass(local(weight))
    return is_float8(stored(weight)) or inside not in (None, FAKE_TENSOR) or not weight.is_floating_point()
