"""Blocks of te.LayerNormLinear and te.LayerNormMLP around torch's attention, each compiled, under
te.autocast."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import built, by_block, size, unchanged, uncompiled
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

NEEDS = ("transformer_engine",)
LAYERS, WIDTH, INNER, HEADS = size((12, 3072, 8192, 24), (2, 256, 512, 4))
VOCABULARY, BATCH, LENGTH = size((32000, 2, 2048), (256, 2, 32))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kept = {"params_dtype": torch.bfloat16, "bias": False, "normalization": "RMSNorm"}
        self.qkv = te.LayerNormLinear(WIDTH, 3 * WIDTH, **kept)
        self.proj = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, bias=False)
        self.mlp = te.LayerNormMLP(WIDTH, INNER, activation="swiglu", **kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = True
        self.recipe: Recipe = DelayedScaling()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))


def in_bf16(model: Decoder) -> Decoder:
    model.fp8 = False
    return model


def with_recipe(model: Decoder, recipe: Recipe) -> Decoder:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_as_compiled": in_bf16,
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("layers",)),
    "cuda-graphs": partial(by_block, lists=("layers",), mode="reduce-overhead"),
    "te-current": partial(with_recipe, recipe=Float8CurrentScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        model = Decoder()
    for block in model.layers:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())
