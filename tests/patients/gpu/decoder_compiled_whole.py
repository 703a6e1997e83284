"""The 468 M decoder compiled as one graph: the compiler sees each of its 24 blocks anew, and takes many times
as long as for one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import decoder_468m
from decoder_468m import example_batch, loss
from torch import nn

__all__ = ["build_model", "example_batch", "loss"]

MUST = ()
MUST_NOT = ("CMP001", "CMP002", "CMP003", "CMP005", "MOD001", "SHP001")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m.build_model(layers)
    model.compile()
    return model
