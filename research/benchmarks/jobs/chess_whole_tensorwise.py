"""A transformer that plays chess without search: 77 characters of a position, a head for the move's value in
128 bins. Tensorwise FP8 but for the head, ``torch.compile(model)``."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

RECIPE = "tensorwise"
LAYERS, WIDTH, INNER, HEADS = size((8, 1536, 4096, 12), (2, 64, 128, 4))
CHARACTERS, LENGTH, BINS, BATCH = size((32, 77, 128, 256), (32, 16, 32, 4))
SKIP = ("head",)
VARIANTS = changes("blocks", skip=SKIP, as_compiled=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm_attention(x)
        q, k, v = (
            each(inner).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        inner = self.norm_mlp(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Player(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BINS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, -1])


def build_model() -> nn.Module:
    with built():
        model = Player()
    return torch.compile(to_float8(model, "tensorwise", skip=SKIP))


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, CHARACTERS, (BATCH, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output.float(), batch["ids"][:, 0])
