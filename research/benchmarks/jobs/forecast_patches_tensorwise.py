"""A forecaster of time series from patches, as PatchTST, 512 wide: tensorwise FP8, every block compiled,
torch's AdamW as it comes. Short for the host."""

from __future__ import annotations

import torch
from plain import DEVICE, adamw, built, by_block, changes, size, to_float8
from torch import nn
from torch.nn import functional

RECIPE = "tensorwise"
LAYERS, WIDTH, HEADS = size((6, 512, 8), (3, 64, 4))
SERIES, PATCHES, PATCH, AHEAD = size((128, 48, 16, 96), (4, 8, 16, 16))
SKIP = ("patches", "head")
VARIANTS = changes("blocks", skip=SKIP)
build_optimizer = adamw


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(PATCH, WIDTH), nn.Embedding(PATCHES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH * PATCHES, AHEAD)

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        mean, spread = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-3
        x = self.patches(((past - mean) / spread).unflatten(1, (PATCHES, PATCH))) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(1)) * spread + mean


def build_model() -> nn.Module:
    with built():
        model = Forecaster()
    return by_block(to_float8(model, skip=SKIP), ("blocks",))


def example_batch() -> dict[str, torch.Tensor]:
    sides = {"past": PATCHES * PATCH, "future": AHEAD}
    return {
        name: torch.randn(SERIES, side, device=DEVICE, dtype=torch.bfloat16) for name, side in sides.items()
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["future"].float())
