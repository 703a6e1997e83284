"""The README's example, converted and compiled, slower than BF16; its head has 128 columns."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

THREAD = "https://github.com/pytorch/ao/issues/2262"
STACK = "torchao"
GPU = "H100"
STAND_IN = ""
CAUSE = "a narrow last layer in FP8"
QUOTE = "such a small N dim that it will have a substantial slowdown with float8"
EXPECTED = ("SHP002",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(8192, 16384, bias=False), nn.Linear(16384, 128, bias=False)
        ).bfloat16()
    convert_to_float8_training(model)
    return torch.compile(model)


def example_batch() -> torch.Tensor:
    return torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
