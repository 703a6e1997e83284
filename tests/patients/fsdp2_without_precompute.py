"""FSDP2 with FP8 all-gather whose scales nobody computes after the step: one all-reduce for each weight, each
time."""

from __future__ import annotations

import torch
from fsdp2_float8 import example_batch, sharded, stepped
from torch import nn

__all__ = ["build_model", "example_batch"]

MUST = ("DST002",)
MUST_NOT = ("DST001", "CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "MEM003")


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(all_gather=True)
    optimizer = stepped(model)
    for block in model:
        block.compile()
    return model, optimizer
