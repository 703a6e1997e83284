"""Layers of an MoE model stay outside of Transformer Engine."""

from __future__ import annotations

import torch
from torch import nn

from tests.complaints.parts import ran_in_te, rows, te_moe

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/850"
STACK = "Megatron"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "the experts are plain layers"
QUOTE = "TransformerEngine implementation is not used when building an MoE layer"
EXPECTED = ("MOD004",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: nn.Sequential(*(te_moe(te.Linear, 4096, 8, 14336) for _ in range(2))), 4096)


def example_batch() -> torch.Tensor:
    return rows(16384, 4096)
