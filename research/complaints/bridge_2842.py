"""Qwen3 30B-A3B is slower in MXFP8 than in BF16 on a B200."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import TeExperts

THREAD = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/2842"
STACK = "Megatron"
GPU = "B200"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "casts of MXFP8 over small experts"
QUOTE = "still mostly mxfp8 cast bound"
EXPECTED = ("SHP002",)


def build_model() -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    with torch.device("meta"):
        model = nn.Sequential(*(TeExperts(te.GroupedLinear, 128, 2048, 768) for _ in range(4))).bfloat16()
    with te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
        model(torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta"))
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(32768, 2048, dtype=torch.bfloat16, device="meta")
