"""BERT of the NLP example, converted to Transformer Engine, slower than in FP16."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/huggingface/accelerate/issues/2597"
STACK = "Accelerate"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "a model too small for FP8"
QUOTE = "you generally won't see speed ups until you're training on a few billion parameters"
EXPECTED = ("STP001", "SHP003")


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 768, 12), 768)


def example_batch() -> torch.Tensor:
    return rows(2048, 768)
