"""A decoder with DeepSeek's latent attention: keys and values of a narrow latent, a rotary part shared by all
heads. Rowwise FP8 but for the narrow projections and the head, ``torch.compile(model)``."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

RECIPE = "rowwise"
LAYERS, WIDTH, INNER, HEADS = size((6, 3072, 8192, 24), (2, 64, 128, 4))
QUERIES, LATENT, PLAIN, ROTARY = size((1536, 512, 128, 64), (32, 16, 16, 16))
VOCABULARY, BATCH, LENGTH = size((32000, 4, 4096), (256, 2, 32))
SKIP = ("rotary", "head")
VARIANTS = changes("layers", skip=SKIP, as_compiled=True)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_norm = nn.Linear(WIDTH, QUERIES, bias=False), nn.RMSNorm(QUERIES)
        self.q_up = nn.Linear(QUERIES, HEADS * (PLAIN + ROTARY), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(WIDTH, LATENT, bias=False), nn.RMSNorm(LATENT)
        self.k_rotary = nn.Linear(WIDTH, ROTARY, bias=False)
        self.kv_up = nn.Linear(LATENT, HEADS * 2 * PLAIN, bias=False)
        self.out = nn.Linear(HEADS * PLAIN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, q_turned = q.split((PLAIN, ROTARY), dim=-1)
        kv = self.kv_up(self.kv_norm(self.kv_down(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = kv.chunk(2, dim=-1)
        k_turned = turned(self.k_rotary(x)[:, None], angles).expand(-1, HEADS, -1, -1)
        q, k = torch.cat((q, turned(q_turned, angles)), -1), torch.cat((k, k_turned), -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x), angles)
        inner = self.norm_mlp(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        pace = 10000.0 ** (-torch.arange(0, ROTARY, 2, dtype=torch.float32) / ROTARY)
        angles = torch.outer(torch.arange(LENGTH, dtype=torch.float32), pace)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), ids[:, 1:].flatten())


def build_model() -> nn.Module:
    with built():
        model = Decoder()
    return torch.compile(to_float8(model, "rowwise", skip=SKIP))


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
