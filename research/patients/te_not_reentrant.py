"""Transformer Engine's blocks under torch's checkpoint as it is by default today, not reentrant, the FP8
autocast around the model: the step raises CheckpointError.

No step is trained while it is built, since it would raise there.
"""

from __future__ import annotations

import torch
from te_autocast import Model, example_batch, loss
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("CKP002",)
MUST_NOT = ("MOD001", "MOD002", "CMP001", "SHP001")


def build_model() -> torch.nn.Module:
    model = Model(fp8=True).cuda()
    model.blocks = torch.nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model
