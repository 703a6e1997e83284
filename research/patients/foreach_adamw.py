"""Compiled FP8 layers of 8B widths with few tokens to many parameters, under AdamW as torch makes it: not
fused."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

MUST = ("STP007",)
MUST_NOT = ("CMP001", "CMP002", "CMP003", "MOD001", "MOD007", "SHP001")

WIDTH, HIDDEN = 4096, 14336


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_model(layers: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("cuda"):
        model = convert_to_float8_training(Model(layers).bfloat16())
    for block in model.blocks:
        block.compile()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def example_batch() -> torch.Tensor:
    return torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()
