"""The 468 M decoder as it should be: the same 168 Float8Linears, every block compiled. 88.3 ms/step on one
H200."""

import decoder_468m
import torch.nn as nn
from decoder_468m import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST: tuple[str, ...] = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001")
SILENT = True


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m.build_model(layers)
    for block in model.b:
        block.compile()
    return model
