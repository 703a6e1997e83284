"""Phi-4 mini's width, cut at 8 layers: transformers' model whose Linears a loop replaced by te.Linear, its
steps inside te.autocast with current scaling. Eager."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import built, by_block, size, tokens, unchanged, uncompiled
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from transformers import Phi3Config, Phi3ForCausalLM

NEEDS = ("transformer_engine",)
RECIPE = "current"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((8, 3072, 8192, 24, 8), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((100352, 2, 4096), (256, 2, 32))


def swapped(model: nn.Module) -> nn.Module:
    """Put a te.Linear over the same weight in the place of every Linear but the head."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                layer = te.Linear(
                    child.in_features, child.out_features, bias=False, params_dtype=child.weight.dtype
                )
                layer.weight = child.weight
                setattr(parent, name, layer)
    return model


def in_bf16(model: nn.Module) -> nn.Module:
    model.fp8 = False
    return model


def with_recipe(model: nn.Module, recipe: Recipe) -> nn.Module:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("model.layers",)),
    "compile-blocks": partial(by_block, lists=("model.layers",)),
    "te-delayed": partial(with_recipe, recipe=DelayedScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    config = Phi3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    with built():
        model = swapped(Phi3ForCausalLM(config).train())
    model.fp8, model.recipe = True, Float8CurrentScaling()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)


def training_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with te.autocast(enabled=model.fp8, recipe=model.recipe):
        return model(**batch).loss
