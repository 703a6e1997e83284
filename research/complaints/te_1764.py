"""FP8 saves no memory, since the transposed inputs are kept."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/1764"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "the BF16 copy of each weight beside its FP8 ones"
QUOTE = "each layer in TE doesn't store the high precision bf16 copy [with fp8-param-gather]"
EXPECTED = ("MEM001",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 4096, 32), 4096)


def example_batch() -> torch.Tensor:
    return rows(8192, 4096)
