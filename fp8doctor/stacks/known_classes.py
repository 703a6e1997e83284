"""Recognize layers by their class: what libraries store in low precision, nanochat's FP8, and users' own FP8.

transformers' forward may run in FP8. Its backward dequantizes to BF16 (5.22 to 5.23); earlier FP8Linears have
none. bitsandbytes never runs in FP8, and its packed weight has no shape. nanochat (``nanochat/fp8.py``,
February 2026) scales tensorwise, casts each operand once, and saves the FP8 tensors for the backward.
If a user's own class runs in FP8, only a step shows.
"""

import re
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fp8doctor.recipes import NANOCHAT
from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import LIBRARIES, ancestor, home, is_a, parameters_of, read, state_of, tensor
from fp8doctor.stacks.tensors import is_float8, local, stored, subclass
from fp8doctor.stacks.torch_private import FAKE_TENSOR

KNOWN: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    (
        "transformers.integrations.",
        (
            *("FP8Linear", "FP8GroupedLinear", "FbgemmFp8Linear"),
            *("FP8Experts", "FP8Expert", "FbgemmFp8Llama4TextExperts"),
        ),
        {"stack": "huggingface"},
    ),
    ("bitsandbytes.", ("Linear4bit", "Linear8bitLt"), {"stack": "bitsandbytes", "use": "storage"}),
    ("nanochat.fp8", ("Float8Linear",), {"stack": NANOCHAT.name, "use": "training", "recipe": "tensorwise"}),
)
"""Packages, their classes, and what differs from a plain layer."""

NAMED = re.compile(r"fp8|float8", re.IGNORECASE)
SWITCH = re.compile(
    r"_?((use|enable|is|with|in)_)?(fp8|float8)(_(enabled|training|matmul|linear))?", re.IGNORECASE
)
"""Attributes that switch FP8 on: ``use_fp8`` in modded-nanogpt."""


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    for prefix, names, known in KNOWN:
        if (kind := ancestor(type(module), prefix, names)) is not None:
            layers = plain.linear(module, gaps) if is_a(module, nn.Linear) else plain.experts(module)
            for each in layers:
                each.features.pop("own_forward", None)
            return tuple(replace(each, kind=kind, **known) for each in layers)
    return of_the_user(module, gaps)


def of_the_user(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    """Describe a layer with 16- or 32-bit weights whose class, weight type or switch says FP8."""
    weights = [each for each in parameters_of(module).values() if each.ndim in (2, 3)]
    if not weights or any(map(_is_quantized, weights)) or home(type(module)).partition(".")[0] in LIBRARIES:
        return ()
    switches = {value for name, value in state_of(module).items() if SWITCH.fullmatch(name)}
    called = f"{type(module).__name__} {read(read(module, 'weight_qtype'), 'name')}"  # the latter is quanto's
    if True not in switches and (False in switches or not NAMED.search(called)):
        return ()
    layers, weight = plain.recognise(module, gaps), tensor(module, "weight")
    if not layers and weight is not None and weight.ndim == 2:
        layers = (plain.layer(module, (weight,), weight.shape[1], weight.shape[0]),)
    return tuple(replace(each, stack="own", use="unknown") for each in layers)


def _is_quantized(weight: Tensor) -> bool:
    inside = subclass(local(weight))
    return is_float8(stored(weight)) or inside not in (None, FAKE_TENSOR) or not weight.is_floating_point()


def bf16_counterpart(module: nn.Module) -> nn.Module:
    return Bf16Linear(module).train(module.training)


class Bf16Linear(nn.Linear):
    """A Linear in BF16 over the Parameters of nanochat's layer."""

    def __init__(self, of: Any) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = of.weight.shape
        self.weight, self.bias = of.weight, of.bias

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (None if each is None else each.bfloat16() for each in (self.weight, self.bias))
        return functional.linear(input.bfloat16(), weight, bias)
