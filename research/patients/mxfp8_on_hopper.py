"""MXFP8, a recipe for Blackwell, on a GPU of the generation before. Compiled, as it should be.

The weights are wrapped as torchao's `quantize_` wraps them; torchao 0.18 refuses to do it itself below torch
2.12.
"""

from __future__ import annotations

import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor

MUST = ("GPU002", "bias-dropped")
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "STP004")


def build_model(layers: int = 4) -> nn.Module:
    with torch.device("cuda"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(layers))
        ).bfloat16()
    recipe = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(MXFP8TrainingWeightWrapperTensor(module.weight.data, recipe))
    for i, block in enumerate(model):
        model[i] = torch.compile(block)
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(8192, 2048, dtype=torch.bfloat16, device="cuda")
