"""Plain FP8 on a GeForce of the Blackwell generation runs at half of MXFP8's speed."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

THREAD = "https://github.com/Nerogar/OneTrainer/pull/1686"
STACK = "others"
GPU = "RTX5090"
STAND_IN = "torchao's tensorwise layers for OneTrainer's own"
CAUSE = "plain FP8 where MXFP8 is twice as fast"
QUOTE = "plain fp8 instructions are much slower than mxfp8"
EXPECTED = ("SHP005",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(6144, 6144, bias=False) for _ in range(8))).bfloat16()
    convert_to_float8_training(model)
    return torch.compile(model)


def example_batch() -> torch.Tensor:
    return torch.empty(4096, 6144, dtype=torch.bfloat16, device="meta")
