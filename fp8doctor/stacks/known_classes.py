"""Recognize layers by their class alone: what a library stores in low precision, and nanochat's FP8.

transformers' forward may run in FP8. Its backward dequantizes to BF16 (5.22 to 5.23); earlier FP8Linears have
none. bitsandbytes never runs in FP8, and its packed weight has no shape. nanochat (``nanochat/fp8.py``,
February 2026) scales tensorwise, casts each operand once, and saves the FP8 tensors for the backward.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fp8doctor.recipes import NANOCHAT
from fp8doctor.stacks import Layer, plain
from fp8doctor.stacks.looking import ancestor, is_a

ORDER = 30

OF_TRANSFORMERS = (
    *("FP8Linear", "FP8GroupedLinear", "FbgemmFp8Linear"),
    *("FP8Experts", "FP8Expert", "FbgemmFp8Llama4TextExperts"),
)

KNOWN: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("transformers.integrations.", OF_TRANSFORMERS, {"stack": "huggingface"}),
    ("bitsandbytes.", ("Linear4bit", "Linear8bitLt"), {"stack": "bitsandbytes", "use": "storage"}),
    (
        "nanochat.fp8",
        ("Float8Linear",),
        {"stack": NANOCHAT.name, "use": "training", "recipe": "tensorwise"},
    ),
)
"""Packages, their classes, and what differs from a plain layer."""

PREFIX = tuple(prefix for prefix, _, _ in KNOWN)


def recognise(module: nn.Module, gaps: dict[str, str]) -> tuple[Layer, ...]:
    for prefix, names, known in KNOWN:
        if (kind := ancestor(type(module), prefix, names)) is not None:
            layers = plain.linear(module, gaps) if is_a(module, nn.Linear) else plain.experts(module)
            return tuple(replace(each, kind=kind, **known) for each in layers)
    return ()


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
