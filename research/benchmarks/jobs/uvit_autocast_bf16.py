"""U-ViT, a diffusion transformer with long skips from its first half to its second, 1,152 wide and cut at 6
blocks a half, a convolution at its end. fp32 weights under autocast to BF16, eager: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
WHOLE = False
LAYERS, WIDTH, HEADS = size((6, 1152, 16), (2, 64, 4))
SIDE, CHANNELS, CLASSES, BATCH = size((64, 4, 1001, 32), (8, 4, 16, 2))
SKIP = ("head",)
VARIANTS = changes("halves.first", "halves.second", skip=SKIP)

autocast = torch.bfloat16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *, skip: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.skip = nn.Linear(2 * WIDTH, WIDTH) if skip else None

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        if self.skip is not None:
            x = self.skip(torch.cat((x, skip), -1))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class UViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // 2) ** 2 + 2, WIDTH))
        self.times = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.labels = nn.Embedding(CLASSES, WIDTH)
        self.halves = nn.ModuleDict(
            {
                "first": nn.ModuleList(Block() for _ in range(LAYERS)),
                "second": nn.ModuleList(Block(skip=True) for _ in range(LAYERS)),
            }
        )
        self.middle = Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * CHANNELS)
        self.last = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, latents: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        image = self.patches(latents).flatten(2).transpose(1, 2)
        given = torch.stack((self.times(times), self.labels(labels)), 1)
        x, skips = torch.cat((given, image), 1) + self.positions, []
        for block in self.halves["first"]:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.halves["second"]:
            x = block(x, skips.pop())
        patches = self.head(self.norm(x))[:, 2:].transpose(1, 2).unflatten(2, (SIDE // 2, SIDE // 2))
        return self.last(functional.pixel_shuffle(patches, 2))


def build_model() -> nn.Module:
    with built(torch.float32):
        return UViT()


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "latents": torch.randn(BATCH, CHANNELS, SIDE, SIDE, device=DEVICE),
        "times": torch.randn(BATCH, WIDTH, device=DEVICE),
        "labels": torch.randint(0, CLASSES, (BATCH,), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["latents"])
