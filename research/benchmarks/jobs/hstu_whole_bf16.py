"""A recommender in the manner of HSTU: attention by SiLU instead of softmax, written out, over 1,024 clicks,
and a loss over drawn items. BF16, ``torch.compile(model)``: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
LAYERS, WIDTH, HEADS = size((8, 2048, 16), (2, 64, 4))
ITEMS, DRAWN, BATCH, LENGTH = size((200_000, 1024, 16, 1024), (512, 32, 2, 32))
VARIANTS = changes("layers", as_compiled=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.uvqk, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_in, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        u, v, q, k = functional.silu(self.uvqk(self.norm_in(x))).chunk(4, dim=-1)
        v, q, k = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (v, q, k))
        weights = functional.silu(q @ k.transpose(-1, -2)) * mask
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return x + self.out(self.norm_out(mixed) * u)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        nn.init.normal_(self.items.weight, std=0.02)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril() / LENGTH, persistent=False)

    def forward(self, clicks: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        x = self.items(clicks[:, :-1])
        for layer in self.layers:
            x = layer(x, self.mask)
        x = self.norm(x)
        right = (x * self.items(clicks[:, 1:])).sum(-1, keepdim=True)
        logits = torch.cat((right, x @ self.items(drawn).T), dim=-1).flatten(0, 1).float()
        return functional.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))


def build_model() -> nn.Module:
    with built():
        model = Recommender()
    return torch.compile(model)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "clicks": torch.randint(0, ITEMS, (BATCH, LENGTH + 1), device=DEVICE),
        "drawn": torch.randint(0, ITEMS, (DRAWN,), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
