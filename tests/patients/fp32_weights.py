"""The 454 M decoder as its constructor makes it, in fp32, converted to FP8 and compiled; nobody thought of
autocast."""

import decoder_454m
import torch
import torch.nn as nn
from decoder_454m import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("STP004",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_454m.build_model(layers).to(torch.float32)
    for block in model.blocks:
        block.compile()
    return model
