"""A decision transformer for control: eight small te.TransformerLayers over 20 steps of return, state and
action, inside te.autocast with delayed scaling. Eager, and short for the host."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import DEVICE, as_a_whole, built, by_block, size, unchanged, uncompiled
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, Recipe

NEEDS = ("transformer_engine",)
RECIPE = "delayed"
WHOLE = False
LAYERS, WIDTH, HEADS = size((8, 512, 8), (2, 256, 4))
STATE, ACTION, STEPS, BATCH = size((48, 16, 20, 64), (16, 16, 16, 2))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = True
        self.recipe: Recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16)
        self.returns, self.state = nn.Linear(1, WIDTH), nn.Linear(STATE, WIDTH)
        self.action = nn.Linear(ACTION, WIDTH)
        self.times = nn.Embedding(STEPS, WIDTH)
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
            )
            for i in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ACTION)

    def forward(self, returns: torch.Tensor, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        parts = (self.returns(returns), self.state(state), self.action(action))
        x = torch.stack([part + self.times.weight for part in parts], 2).flatten(1, 2)
        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x[:, 1::3]))


def in_bf16(model: Policy) -> Policy:
    model.fp8 = False
    return model


def with_recipe(model: Policy, recipe: Recipe) -> Policy:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("layers",)),
    "compile-blocks": partial(by_block, lists=("layers",)),
    "compile-model": as_a_whole,
    "te-current": partial(with_recipe, recipe=Float8CurrentScaling()),
}


def build_model() -> nn.Module:
    with built():
        return Policy()


def example_batch() -> dict[str, torch.Tensor]:
    sides = {"returns": 1, "state": STATE, "action": ACTION}
    return {
        name: torch.randn(BATCH, STEPS, side, device=DEVICE, dtype=torch.bfloat16)
        for name, side in sides.items()
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["action"].float())
