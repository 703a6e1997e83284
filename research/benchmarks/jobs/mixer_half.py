"""MLP-Mixer: the channel MLPs in FP8, compiled by block; the token MLPs (196 patches) stay in BF16."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, PATCHES, HIDDEN, BATCH = size((12, 1024, 196, 512, 256), (2, 64, 25, 32, 4))
SKIP = ("tokens", "head", "stem")
VARIANTS = changes("blocks", skip=SKIP)


def mlp(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens, self.channels = mlp(PATCHES, HIDDEN), mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(768, WIDTH), nn.Linear(WIDTH, 1000)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.stem(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build_model() -> nn.Module:
    with built():
        model = to_float8(Mixer(), skip=SKIP)
    for block in model.blocks:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(BATCH, PATCHES, 768, device=DEVICE, dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        output.float(), torch.zeros(len(output), dtype=torch.long, device=output.device)
    )
