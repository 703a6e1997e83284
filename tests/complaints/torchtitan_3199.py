"""MXFP8 was asked for the experts, and quantize_ converted none of them."""

from __future__ import annotations

import torch
from torch import nn
from torchao.quantization import quantize_

from tests import prototypes
from tests.complaints.parts import MoeBlock

THREAD = "https://github.com/pytorch/torchtitan/pull/3199"
STACK = "torchao"
GPU = "B200"
STAND_IN = ""
CAUSE = "quantize_ takes Linears only, so the experts stay in BF16"
QUOTE = "GroupedExperts is not an nn.Linear, so the quantize_ call [...] was a silent no-op"
EXPECTED = ("MOD004",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(MoeBlock(4096, 8, 14336) for _ in range(2))).bfloat16()
    quantize_(
        model,
        prototypes.mxfp8("MXFP8_RCEIL"),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and not name.endswith("router"),
    )
    for block in model:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(16384, 4096, dtype=torch.bfloat16, device="meta")
