"""A decoder of te.TransformerLayer, 4096 wide, inside te.autocast with delayed scaling."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import built, size
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

NEEDS = ("transformer_engine",)
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((8, 4096, 14336, 32, 8), (2, 256, 512, 4, 2))
VOCABULARY, BATCH, LENGTH = size((32000, 2, 2048), (256, 2, 32))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = True
        self.recipe: Recipe = DelayedScaling()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = te.RotaryPositionEmbedding(WIDTH // HEADS)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                INNER,
                HEADS,
                num_gqa_groups=GROUPS,
                layer_number=i + 1,
                params_dtype=torch.bfloat16,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
            )
            for i in range(LAYERS)
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, angles = self.embedding(tokens), self.rotary(tokens.shape[1])
        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            for layer in self.layers:
                x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


def in_bf16(model: Decoder) -> Decoder:
    model.fp8 = False
    return model


def by_block(model: Decoder) -> Decoder:
    for layer in model.layers:
        layer.compile()
    return model


def with_recipe(model: Decoder, recipe: Recipe) -> Decoder:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": lambda model: model,
    "bf16": in_bf16,
    "bf16_compiled": lambda model: by_block(in_bf16(model)),
    "compile-blocks": by_block,
    "te-current": partial(with_recipe, recipe=Float8CurrentScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        return Decoder()


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device="cuda")


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())
