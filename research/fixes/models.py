"""Small models that transformers does not have."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


class Conditioned(nn.Module):
    """Blocks over tokens, and a layer that sees one row a sample, as in diffusion models."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time_embedding = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> SimpleNamespace:
        y = x + self.time_embedding(time)[:, None]
        for block in self.blocks:
            y = y + block(y)
        return SimpleNamespace(loss=(y - x.flip(0)).float().square().mean())
