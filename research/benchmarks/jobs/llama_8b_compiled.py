"""Llama 3.1 8B, every Linear but the head in FP8, every block compiled."""

from __future__ import annotations

import llama_8b_eager
from llama_8b_eager import VARIANTS, example_batch
from torch import nn

__all__ = ["VARIANTS", "build_model", "example_batch"]

COLD_S = 120.0


def build_model() -> nn.Module:
    model = llama_8b_eager.build_model()
    for block in model.model.layers:
        block.compile()
    return model
