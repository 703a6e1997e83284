"""The 454 M decoder with every FP8 Linear compiled by itself: no cast is fused with the norm or activation
beside it."""

import decoder_454m
import torch.nn as nn
from decoder_454m import example_batch, loss
from torchao.float8.float8_linear import Float8Linear

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("only-linears-compiled",)
MUST_NOT = ("eager-float8", "CMP002", "MOD001", "MOD003", "unaligned-dimensions", "STP004")


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_454m.build_model(layers)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.compile()
    return model
