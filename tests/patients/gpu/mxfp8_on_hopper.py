"""MXFP8, a recipe for Blackwell, on a GPU of the generation before. Compiled, as it should be."""

from __future__ import annotations

import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_

MUST = ("GPU002",)
MUST_NOT = ("GPU001", "CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "MEM003")


def build_model(layers: int = 4) -> nn.Module:
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(layers))).bfloat16()
    recipe = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)
    quantize_(model, recipe, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    for block in model:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(8192, 2048, dtype=torch.bfloat16, device="cuda")
