"""A toy transformer of te.Linear: the host takes twice as long to launch FP8, and the GPU is idle."""

from __future__ import annotations

import torch
from torch import nn

from tests.complaints.parts import mlp

THREAD = "https://github.com/NVIDIA/TransformerEngine/issues/761"
STACK = "Transformer Engine"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built; its widths were not written"
CAUSE = "host time of each FP8 layer"
QUOTE = "scheduling a te.Linear layer in FP8 takes more than 2x more time"
EXPECTED = ("STP001",)


def build_model() -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    with torch.device("meta"):
        model = mlp(te.Linear, 1024, 24).bfloat16()
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        model(torch.empty(16, 1024, dtype=torch.bfloat16, device="meta"))
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(2048, 1024, dtype=torch.bfloat16, device="meta")
