"""A 13B GPT is 1.35 times as fast with FP8, not twice."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/Megatron-LM/issues/396"
STACK = "Megatron"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built"
CAUSE = "what is not a GEMM takes its share"
QUOTE = "The actual end-to-end speedup will be less than this, since you must account for other overheads"
EXPECTED = ()


def build_model() -> nn.Module:
    return ran_in_te(lambda te: mlp(te.Linear, 5120, 40), 5120)


def example_batch() -> torch.Tensor:
    return rows(8192, 5120)
