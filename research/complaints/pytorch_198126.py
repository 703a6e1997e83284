"""Training in MXFP8 on a GeForce of the Blackwell generation."""

from __future__ import annotations

import torch
from torch import nn
from torchao.quantization import quantize_

from tests import prototypes

THREAD = "https://github.com/pytorch/pytorch/issues/198126"
STACK = "torchao"
GPU = "RTX5090"
STAND_IN = "an RTX 5090's datasheet for the RTX 5060 Ti"
CAUSE = "a recipe whose backward the GPU has no kernels for"
QUOTE = "this is a 12.x-specific cuBLAS kernel-coverage gap"
EXPECTED = ("GPU002",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).bfloat16()
    quantize_(
        model, prototypes.mxfp8("MXFP8_RCEIL"), filter_fn=lambda module, name: isinstance(module, nn.Linear)
    )
    return torch.compile(model)


def example_batch() -> torch.Tensor:
    return torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
