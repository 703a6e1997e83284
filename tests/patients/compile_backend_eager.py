"""Every block is compiled with backend="aot_eager", left over from debugging: graphs are captured, no kernel
is generated."""

import decoder_468m
import torch.nn as nn
from decoder_468m import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("CMP002",)
MUST_NOT = ("CMP001", "MOD001", "MOD003", "SHP001")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m.build_model(layers)
    for block in model.b:
        block.compile(backend="aot_eager")
    return model
