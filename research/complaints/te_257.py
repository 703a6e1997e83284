"""OPT-1.3B takes more memory with te.Linear than in FP16."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/257"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "FP8 copies beside the high-precision weights"
QUOTE = "TE keeps both high-precision and FP8 copies by default"
EXPECTED = ("MEM001",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 2048, 24), 2048)


def example_batch() -> torch.Tensor:
    return rows(16384, 2048)
