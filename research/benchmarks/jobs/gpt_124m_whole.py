"""A GPT of 124M as nanoGPT trains it: the loss in the forward, blocks in FP8, ``torch.compile(model)``."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

COLD_S = 120.0
LAYERS, WIDTH, HEADS = size((12, 768, 12), (2, 64, 4))
VOCABULARY, BATCH, LENGTH = size((50304, 16, 1024), (256, 2, 32))
VARIANTS = changes("h", as_compiled=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in self.c_attn(x).split(WIDTH, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attn = Attention()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model() -> nn.Module:
    with built():
        model = GPT()
    return torch.compile(to_float8(model))


def example_batch() -> dict[str, torch.Tensor]:
    idx = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), device=DEVICE)
    return {"idx": idx[:, :-1].contiguous(), "targets": idx[:, 1:].contiguous()}


def loss(output: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output[1]
