"""A Trainer with torchao through a configuration file: a side that 16 does not divide."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

THREAD = "https://github.com/huggingface/accelerate/issues/3830"
STACK = "Accelerate"
GPU = "H100"
STAND_IN = "rows that 16 does not divide for the collated batch"
CAUSE = "sides that FP8 GEMMs cannot take without padding"
QUOTE = "This PR sets reasonable defaults [...] enable_fsdp_float8_all_gather=True and pad_inner_dim=True"
EXPECTED = ("SHP001",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).bfloat16()
    convert_to_float8_training(model)
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(456, 4096, dtype=torch.bfloat16, device="meta")
