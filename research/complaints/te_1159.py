"""te.Linear on an RTX 3090."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/1159"
STACK = "Transformer Engine"
GPU = "A100"
STAND_IN = "Transformer Engine's classes, which need a GPU; an A100's datasheet for the RTX 3090"
CAUSE = "a GPU without FP8 tensor cores"
QUOTE = "RTX 3090 is using Ampere architecture, which does not have support for FP8"
EXPECTED = ("GPU002",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: nn.Sequential(te.Linear(768, 3072)), 768)


def example_batch() -> torch.Tensor:
    return rows(2048, 768)
