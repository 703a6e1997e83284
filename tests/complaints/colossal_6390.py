"""BERT with a head of two classes fails once FP8 is on."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

THREAD = "https://github.com/hpcaitech/ColossalAI/issues/6390"
STACK = "others"
GPU = "H100"
STAND_IN = "torchao's layers for ColossalAI's own"
CAUSE = "a side that 16 does not divide"
QUOTE = "Expected both dimensions of mat2 to be divisible by 16 but got torch.Size([768, 2])"
EXPECTED = ("SHP001", "SHP002")


def build_model() -> nn.Module:
    with torch.device("meta"):
        body = [nn.Linear(768, 768) for _ in range(12)]
        model = nn.Sequential(*body, nn.Linear(768, 2)).bfloat16()
    convert_to_float8_training(model)
    return torch.compile(model)


def example_batch() -> torch.Tensor:
    return torch.empty(16384, 768, dtype=torch.bfloat16, device="meta")
