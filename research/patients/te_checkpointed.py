"""Transformer Engine's blocks under torch's checkpoint, the FP8 autocast around the model: the recompute runs
in BF16."""

from __future__ import annotations

import torch
from te_autocast import Block, example_batch, loss
from te_autocast import Model as WithoutCheckpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

__all__ = ["Block", "build_model", "example_batch", "loss"]

MUST = ("CKP002",)
MUST_NOT = ("MOD001", "CMP001", "SHP001")


def build_model() -> torch.nn.Module:
    model = WithoutCheckpoint(fp8=True).cuda()
    model.blocks = torch.nn.ModuleList(
        checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.REENTRANT) for block in model.blocks
    )
    batch = example_batch()
    for _ in range(2):
        loss(model(batch), batch).backward()
    return model
