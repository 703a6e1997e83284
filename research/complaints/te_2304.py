"""MXFP8 on an RTX Pro 6000 of the Blackwell generation."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/2304"
STACK = "Transformer Engine"
GPU = "RTX5090"
STAND_IN = "Transformer Engine's classes, which need a GPU; an RTX 5090 for the RTX Pro 6000"
CAUSE = "a recipe that this GPU has no kernels for"
QUOTE = "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
EXPECTED = ("GPU002",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 4096, 8), 4096, "MXFP8BlockScaling")


def example_batch() -> torch.Tensor:
    return rows(8192, 4096)
