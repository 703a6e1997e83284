"""A decoder of te.TransformerLayer, 3,072 wide, inside te.autocast with delayed scaling: eager, so large that
the GPU sets the pace, torch's AdamW as it comes."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import DEVICE, adamw, built, by_block, size, unchanged, uncompiled, with_fused_optimizer
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

NEEDS = ("transformer_engine",)
RECIPE = "delayed"
WHOLE = False
LAYERS, WIDTH, HEADS = size((8, 3072, 24), (2, 256, 4))
VOCABULARY, BATCH, LENGTH = size((50304, 4, 2048), (256, 2, 32))
build_optimizer = adamw


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8, self.recipe = True, DelayedScaling()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
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
                self_attn_mask_type="causal",
                normalization="RMSNorm",
                bias=False,
            )
            for i in range(LAYERS)
        )
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions.weight
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
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("layers",)),
    "compile-blocks": partial(by_block, lists=("layers",)),
    "fused-optimizer": with_fused_optimizer,
    "te-current": partial(with_recipe, recipe=Float8CurrentScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        return Decoder()


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), batch["ids"][:, 1:].flatten())
