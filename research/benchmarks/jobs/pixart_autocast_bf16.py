"""PixArt's diffusion transformer, cut at 12 blocks: self-attention, cross-attention to a T5's 120 tokens, one
modulation for all blocks. fp32 weights under autocast to BF16, each block compiled: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, by_block, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
WHOLE = False
LAYERS, WIDTH, HEADS = size((12, 1152, 16), (2, 64, 4))
SIDE, CHANNELS, WORDS, TEXT, BATCH = size((64, 4, 120, 4096, 24), (8, 4, 16, 64, 2))
SKIP = ("times", "patches", "captions", "head")
VARIANTS = changes("blocks", skip=SKIP)

autocast = torch.bfloat16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm_mlp = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.table = nn.Parameter(torch.randn(6, WIDTH) / WIDTH**0.5)
        self.attention, self.cross = Attention(), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, words: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
        shift_a, scale_a, gate_a, shift, scale, gate = (self.table + modulation)[:, :, None].unbind(1)
        inner = self.norm_attention(x) * (1 + scale_a) + shift_a
        x = x + gate_a * self.attention(inner, inner)
        x = x + self.cross(x, words)
        inner = self.norm_mlp(x) * (1 + scale) + shift
        return x + gate * self.down(functional.gelu(self.up(inner), approximate="tanh"))


class PixArt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // 2) ** 2, WIDTH))
        self.times = nn.Sequential(
            nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH)
        )
        self.captions = nn.Sequential(nn.Linear(TEXT, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = (
            nn.LayerNorm(WIDTH, elementwise_affine=False),
            nn.Linear(WIDTH, 4 * 2 * CHANNELS),
        )

    def forward(self, latents: torch.Tensor, time: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        modulation = self.times(time).unflatten(-1, (6, WIDTH))
        words = self.captions(words)
        for block in self.blocks:
            x = block(x, words, modulation)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    with built(torch.float32):
        return by_block(PixArt(), ("blocks",))


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "latents": torch.randn(BATCH, CHANNELS, SIDE, SIDE, device=DEVICE),
        "time": torch.randn(BATCH, 256, device=DEVICE),
        "words": torch.randn(BATCH, WORDS, TEXT, device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output.float().square().mean()
