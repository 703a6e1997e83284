"""A text encoder of te.TransformerLayer, 2,560 wide, that runs in BF16, without te.autocast: what would
FP8 give?"""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import DEVICE, built, by_block, size, unchanged
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

NEEDS = ("transformer_engine",)
RECIPE = None
WHOLE = False
LAYERS, WIDTH, HEADS = size((10, 2560, 20), (2, 256, 4))
VOCABULARY, BATCH, LENGTH = size((30592, 32, 512), (256, 2, 32))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                WIDTH,
                4 * WIDTH,
                HEADS,
                layer_number=i + 1,
                layer_type="encoder",
                params_dtype=torch.bfloat16,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                self_attn_mask_type="no_mask",
            )
            for i in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, : LENGTH // 8]))


def in_autocast(model: Encoder, recipe: Recipe) -> Encoder:
    """Run the layers, not the head, inside te.autocast."""
    forward = model.forward

    def inside(ids: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return forward(ids)

    model.forward = inside
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": unchanged,
    "bf16_compiled": partial(by_block, lists=("layers",)),
    "compile-blocks": partial(by_block, lists=("layers",)),
    "te-autocast": partial(in_autocast, recipe=DelayedScaling()),
    "convert-te-delayed": partial(in_autocast, recipe=DelayedScaling()),
    "convert-te-current": partial(in_autocast, recipe=Float8CurrentScaling()),
    "convert-te-block": partial(in_autocast, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        return Encoder()


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), batch["ids"][:, : LENGTH // 8].flatten())
