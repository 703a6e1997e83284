"""te.Linear on an RTX 3090."""

from __future__ import annotations

import torch
from torch import nn

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/1159"
STACK = "Transformer Engine"
GPU = "A100"
STAND_IN = "Transformer Engine's classes, which need a GPU; an A100's datasheet for the RTX 3090"
CAUSE = "a GPU without FP8 tensor cores"
QUOTE = "RTX 3090 is using Ampere architecture, which does not have support for FP8"
EXPECTED = ("GPU001",)


def build_model() -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    with torch.device("meta"):
        model = nn.Sequential(te.Linear(768, 3072)).bfloat16()
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        model(torch.empty(16, 768, dtype=torch.bfloat16, device="meta"))
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(2048, 768, dtype=torch.bfloat16, device="meta")
