"""Blocks of width 1000 on 1003 rows, converted without a filter and compiled: a CPU computes that, a GPU
raises in the step."""

import torch
import torch.nn as nn
from torchao.float8 import convert_to_float8_training

MUST = ("SHP001",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_model(layers: int = 4) -> nn.Module:
    with torch.device(DEVICE):
        model = nn.Sequential(*(Block(1000) for _ in range(layers))).bfloat16()
    convert_to_float8_training(model)
    for block in model:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(1003, 1000, dtype=torch.bfloat16, device=DEVICE)
