"""A ViT whose MLPs alone are te.LayerNormMLP, inside te.fp8_autocast with delayed scaling as older scripts
write it; its attention is of torch's Linears. Eager."""

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
    Format,
    Recipe,
)

NEEDS = ("transformer_engine",)
RECIPE = "delayed"
WHOLE = False
LAYERS, WIDTH, HEADS = size((12, 2048, 16), (2, 256, 4))
SIDE, PATCH, CLASSES, BATCH = size((256, 16, 1000, 64), (64, 16, 16, 2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = te.LayerNormMLP(WIDTH, 4 * WIDTH, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = True
        self.recipe: Recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16)
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        with te.fp8_autocast(enabled=self.fp8, fp8_recipe=self.recipe):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x).mean(1))


def in_bf16(model: VisionTransformer) -> VisionTransformer:
    model.fp8 = False
    return model


def with_recipe(model: VisionTransformer, recipe: Recipe) -> VisionTransformer:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("blocks",)),
    "compile-blocks": partial(by_block, lists=("blocks",)),
    "te-current": partial(with_recipe, recipe=Float8CurrentScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        return VisionTransformer()


def example_batch() -> torch.Tensor:
    return torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float(), torch.arange(len(batch), device=output.device))
