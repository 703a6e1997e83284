"""A protein encoder of ESM-2's 3B width, cut at 10 layers: te.TransformerLayer without a mask, inside
te.autocast with current scaling, eager."""

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
RECIPE = "current"
LAYERS, WIDTH, HEADS = size((10, 2560, 40), (2, 256, 4))
VOCABULARY, BATCH, LENGTH = size((64, 8, 1024), (64, 2, 32))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = True
        self.recipe: Recipe = Float8CurrentScaling()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = te.RotaryPositionEmbedding(WIDTH // HEADS)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                4 * WIDTH,
                HEADS,
                layer_number=i + 1,
                params_dtype=torch.bfloat16,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                self_attn_mask_type="no_mask",
            )
            for i in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, residues: torch.Tensor) -> torch.Tensor:
        x, angles = self.embedding(residues), self.rotary(residues.shape[1])
        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


def in_bf16(model: Encoder) -> Encoder:
    model.fp8 = False
    return model


def with_recipe(model: Encoder, recipe: Recipe) -> Encoder:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("layers",)),
    "compile-blocks": partial(by_block, lists=("layers",)),
    "te-delayed": partial(with_recipe, recipe=DelayedScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        return Encoder()


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())
