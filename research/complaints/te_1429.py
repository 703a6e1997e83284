"""An LLM through Accelerate takes more memory in FP8 than in FP16."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/1429"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "high-precision weights, gradients and states beside FP8"
QUOTE = "stores weights (and gradients, optimizer state etc.) in higher precision"
EXPECTED = ("MEM001",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 4096, 32), 4096)


def example_batch() -> torch.Tensor:
    return rows(8192, 4096)
