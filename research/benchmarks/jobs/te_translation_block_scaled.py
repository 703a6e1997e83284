"""An encoder-decoder for translation of te.TransformerLayer, 3,072 wide, inside te.autocast with block
scaling, eager."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import DEVICE, built, by_block, size, unchanged, uncompiled
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
)

NEEDS = ("transformer_engine",)
RECIPE = "block"
WHOLE = False
LAYERS, WIDTH, HEADS = size((6, 3072, 24), (2, 256, 4))
VOCABULARY, BATCH, SOURCE, TARGET = size((32000, 16, 512, 512), (256, 2, 128, 128))


def layer(number: int, kind: str) -> te.TransformerLayer:
    return te.TransformerLayer(
        WIDTH,
        4 * WIDTH,
        HEADS,
        layer_number=number + 1,
        layer_type=kind,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        self_attn_mask_type="causal" if kind == "decoder" else "no_mask",
        enc_dec_attn_mask_type="no_mask",
    )


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = True
        self.recipe: Recipe = Float8BlockScaling()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(max(SOURCE, TARGET), WIDTH)
        self.encoder = nn.ModuleList(layer(i, "encoder") for i in range(LAYERS))
        self.decoder = nn.ModuleList(layer(i, "decoder") for i in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) + self.positions.weight[: ids.shape[1]]

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self.embedded(source), self.embedded(target)
        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            for block in self.encoder:
                memory = block(memory)
            for block in self.decoder:
                x = block(x, encoder_output=memory)
        return self.head(self.norm(x))


def in_bf16(model: Translator) -> Translator:
    model.fp8 = False
    return model


def with_recipe(model: Translator, recipe: Recipe) -> Translator:
    model.recipe = recipe
    return model


LISTS = ("encoder", "decoder")
VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_compiled": lambda model: by_block(in_bf16(model), LISTS),
    "compile-blocks": partial(by_block, lists=LISTS),
    "te-delayed": partial(with_recipe, recipe=DelayedScaling()),
    "te-current": partial(with_recipe, recipe=Float8CurrentScaling()),
}


def build_model() -> nn.Module:
    with built():
        return Translator()


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "source": torch.randint(0, VOCABULARY, (BATCH, SOURCE), device=DEVICE),
        "target": torch.randint(0, VOCABULARY, (BATCH, TARGET), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), batch["target"][:, 1:].flatten())
