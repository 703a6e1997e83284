"""The compiled FP8 decoder whose blocks look for NaN on the way: the branch depends on data, so each is
compiled in pieces."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "patients"))

import decoder_468m
import torch
import torch.nn as nn
from decoder_468m import Block, example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("CMP003",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001")


class Watched(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if x.isnan().any():
            raise FloatingPointError("NaN in a block")
        return x + 0.0


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m.build_model(layers)
    for block in model.b:
        block.__class__ = Watched
        block.compile()
    return model
