"""A diffusion transformer loaded in float8 is no faster than in bfloat16."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp

THREAD = "https://github.com/modelscope/DiffSynth-Studio/issues/530"
STACK = "others"
GPU = "H100"
STAND_IN = "an MLP for the diffusion transformer"
CAUSE = "weights are stored in FP8 and computed in BF16"
QUOTE = "we have to temporarily convert to bfloat16 precision during computation"
EXPECTED = ("MOD003",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = mlp(nn.Linear, 3072, 8).bfloat16()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(4096, 3072, dtype=torch.bfloat16, device="meta")
