"""A small adapter on a large frozen transformer in te.Linear takes too much memory."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/1880"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "frozen weights are kept in high precision beside FP8"
QUOTE = "You can store weights in low precision by initializing the model within an fp8_model_init context"
EXPECTED = ("MEM001",)


def build_model() -> nn.Module:
    model = ran_in_te(lambda te: mlp(te.Linear, 4096, 32), 4096)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.adapter = nn.Linear(4096, 16, bias=False, dtype=torch.bfloat16, device="meta")
    return model


def example_batch() -> torch.Tensor:
    return rows(8192, 4096)
