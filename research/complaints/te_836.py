"""A 1B model on an H800, slower in FP8 than in FP16."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/836"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built; an H100's datasheet for the H800"
CAUSE = "host time of each FP8 layer"
QUOTE = "The slowdown comes from the CPU overheads"
EXPECTED = ("STP001",)


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 2048, 24), 2048)


def example_batch() -> torch.Tensor:
    return rows(2048, 2048)
