"""An LLM through Accelerate takes more memory in FP8 than in FP16."""

from __future__ import annotations

import torch
from torch import nn

from tests.complaints.parts import mlp

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/1429"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "high-precision weights, gradients and states beside FP8"
QUOTE = "stores weights (and gradients, optimizer state etc.) in higher precision"
EXPECTED = ("MEM005",)


def build_model() -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    with torch.device("meta"):
        model = mlp(te.Linear, 4096, 32).bfloat16()
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        model(torch.empty(16, 4096, dtype=torch.bfloat16, device="meta"))
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
