"""BERT of the NLP example, converted to Transformer Engine, slower than in FP16."""

from __future__ import annotations

import torch
from torch import nn

from tests.complaints.parts import mlp

THREAD = "https://github.com/huggingface/accelerate/issues/2597"
STACK = "Accelerate"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "a model too small for FP8"
QUOTE = "you generally won't see speed ups until you're training on a few billion parameters"
EXPECTED = ("STP001", "SHP003")


def build_model() -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    with torch.device("meta"):
        model = mlp(te.Linear, 768, 12).bfloat16()
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        model(torch.empty(16, 768, dtype=torch.bfloat16, device="meta"))
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(2048, 768, dtype=torch.bfloat16, device="meta")
