"""A toy transformer of te.Linear: the host takes twice as long to launch FP8, and the GPU is idle."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/761"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built; its widths were not written"
CAUSE = "host time of each FP8 layer"
QUOTE = "scheduling a te.Linear layer in FP8 takes more than 2x more time"
EXPECTED = ("STP001",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 1024, 24), 1024)


def example_batch() -> torch.Tensor:
    return rows(2048, 1024)
