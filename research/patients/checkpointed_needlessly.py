"""The 468 M decoder, compiled, with every block checkpointed on a GPU that could keep its activations (10
against 20 GiB on an H200)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "patients"))

import decoder_468m
from decoder_468m import example_batch, loss
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("CKP001",)
MUST_NOT = ("CMP001", "CMP002", "CMP003", "CMP005", "CKP002", "MOD001")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m.build_model(layers)
    model.b = nn.ModuleList(checkpoint_wrapper(block) for block in model.b)
    for block in model.b:
        block.compile()
    return model
