"""Twelve compiled blocks of width 1024 with torchao's rowwise recipe, whose casts cost more than such GEMMs
give back."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MUST = ("SHP005",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "SHP001", "MEM001")

VOCABULARY = 32000


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(layers: int = 12) -> nn.Module:
    with torch.device("cuda"):
        model = Model(1024, layers).bfloat16()
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
    for block in model.blocks:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (16, 1024), device="cuda")


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())
