"""Experts of DeepSeek-V3 16B in MXFP8 on a B200, 0.95x of BF16."""

from __future__ import annotations

import torch
from torch import nn
from torchao.quantization import quantize_

from research.complaints.parts import GroupedExperts
from tests import prototypes

THREAD = "https://github.com/pytorch/torchtitan/issues/2086"
STACK = "torchao"
GPU = "B200"
STAND_IN = ""
CAUSE = "experts too small for the casts of MXFP8"
QUOTE = "Looks like it works only for big MoE models?"
EXPECTED = ("SHP002",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(GroupedExperts(8, 2048, 1408) for _ in range(4))).bfloat16()
    quantize_(
        model,
        prototypes.mxfp8("MXFP8_RCEIL"),
        filter_fn=lambda module, name: isinstance(module, GroupedExperts),
    )
    for block in model:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(131072, 2048, dtype=torch.bfloat16, device="meta")
