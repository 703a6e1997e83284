"""The MNIST example takes the same time with and without FP8 on an RTX 4090."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/15"
STACK = "Transformer Engine"
GPU = "RTX4090"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "layers far too small for FP8"
QUOTE = "FP8 is for transformer, not for simple task as mnist"
EXPECTED = ("STP001", "SHP002", "SHP003")


def build_model() -> nn.Module:
    return ran_in_te(lambda te: nn.Sequential(te.Linear(9216, 128), te.Linear(128, 16)), 9216)


def example_batch() -> torch.Tensor:
    return rows(2048, 9216)
