"""Checkpointing recomputes Transformer Engine's layers outside of the autocast."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from research.complaints.parts import mlp, ran_in_te, rows

THREAD = "https://github.com/NVIDIA/Megatron-LM/pull/7538"
STACK = "Megatron"
GPU = "H100"
STAND_IN = "Transformer Engine's classes, which need a GPU to be built; torch's checkpoint for Megatron's"
CAUSE = "the recompute runs in BF16"
QUOTE = "with BF16 parameters the recompute silently runs in BF16 while the forward ran in FP8"
EXPECTED = ("CKP002",)


def build_model() -> nn.Module:
    return ran_in_te(
        lambda te: nn.Sequential(*(checkpoint_wrapper(mlp(te.Linear, 4096, 1)) for _ in range(8))), 4096
    )


def example_batch() -> torch.Tensor:
    return rows(8192, 4096)
