"""LoRA on a model in FP8 takes as long as on the full one."""

from __future__ import annotations

import torch
from torch import nn

from research.complaints.parts import mlp

THREAD = "https://github.com/Lightricks/LTX-Video-Trainer/issues/25"
STACK = "others"
GPU = "RTX4090"
STAND_IN = "plain float8 weights for quanto's"
CAUSE = "the frozen weights are stored in FP8, and nothing computes in it"
QUOTE = "lora training in 8 bit is not available in torch itself"
EXPECTED = ("MOD003",)


def build_model() -> nn.Module:
    with torch.device("meta"):
        model = mlp(nn.Linear, 3072, 8).bfloat16()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    model.adapter = nn.Linear(3072, 16, bias=False, dtype=torch.bfloat16, device="meta")
    return model


def example_batch() -> torch.Tensor:
    return torch.empty(4096, 3072, dtype=torch.bfloat16, device="meta")
