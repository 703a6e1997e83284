"""Every block is compiled, and TORCHDYNAMO_DISABLE=1 was left over from a debugging session: nothing is
compiled.

The file sets the variable itself. torch reads it whenever torch.compile is called, so it must stand before
the first call.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import decoder_468m
import torch.nn as nn
from decoder_468m import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("CMP002",)
MUST_NOT = ("MOD001", "MOD003", "SHP001")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m.build_model(layers)
    for block in model.b:
        block.compile()
    return model
