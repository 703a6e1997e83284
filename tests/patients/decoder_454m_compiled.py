"""The 454 M decoder with every block compiled; its tied head of 50257 outputs stays in BF16, as it should."""

import decoder_454m
import torch.nn as nn
from decoder_454m import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("slow-16-bit-gemm",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "unaligned-dimensions")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_454m.build_model(layers)
    for block in model.blocks:
        block.compile()
    return model
