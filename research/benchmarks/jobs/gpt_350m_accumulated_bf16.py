"""A GPT of 350M in the manner of modded-nanoGPT (rotary, norms of q and k, squared ReLU) in BF16:
``torch.compile(model)``, a step of four short micro-batches."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
LAYERS, WIDTH, HEADS = size((14, 1280, 10), (2, 64, 4))
VOCABULARY, BATCH, LENGTH = size((50304, 1, 1024), (256, 2, 32))
VARIANTS = changes("h", as_compiled=True)
accumulate = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k = (turned(functional.rms_norm(each, (each.shape[-1],)), cos, sin) for each in (q, k))
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(functional.rms_norm(x, (WIDTH,)), cos, sin)
        return x + self.down(functional.relu(self.up(functional.rms_norm(x, (WIDTH,)))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        half = WIDTH // HEADS // 2
        positions = torch.arange(LENGTH, dtype=torch.float32)
        angles = torch.outer(positions, 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half))
        self.register_buffer("cos", angles.cos()[:, None].to(self.wte.weight.dtype), persistent=False)
        self.register_buffer("sin", angles.sin()[:, None].to(self.wte.weight.dtype), persistent=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = functional.rms_norm(self.wte(idx), (WIDTH,))
        for block in self.h:
            x = block(x, self.cos, self.sin)
        logits = self.lm_head(functional.rms_norm(x, (WIDTH,)))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_model() -> nn.Module:
    with built():
        model = GPT()
    return torch.compile(model)


def example_batch() -> dict[str, torch.Tensor]:
    idx = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)
    return {"idx": idx[:, :-1].contiguous(), "targets": idx[:, 1:].contiguous()}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
