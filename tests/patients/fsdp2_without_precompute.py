"""FSDP2 with FP8 all-gather whose scales nobody computes after the step: one all-reduce for each weight, each
time."""

import torch
from fsdp2_float8 import example_batch, sharded, stepped
from torch import nn

__all__ = ["build_model", "example_batch"]

MUST = ("DST001",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "STP004")


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(all_gather=True)
    optimizer = stepped(model)
    for block in model:
        block.compile()
    return model, optimizer
