"""The 454 M decoder with its inputs cast to E5M2, the format for gradients, and its gradients to E4M3."""

import decoder_454m
import torch
import torch.nn as nn
from decoder_454m import example_batch, loss
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("NUM003",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "unaligned-dimensions", "STP004")


def build_model(layers: int = 24) -> nn.Module:
    with torch.device(decoder_454m.DEVICE):
        model = decoder_454m.GPT(layers=layers).bfloat16()
    swapped = Float8LinearConfig(
        cast_config_input=CastConfig(target_dtype=torch.float8_e5m2),
        cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
    )
    convert_to_float8_training(model, config=swapped, module_filter_fn=lambda module, name: name != "head")
    for block in model.blocks:
        block.compile()
    return model
