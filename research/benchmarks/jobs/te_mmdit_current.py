"""A diffusion transformer of two streams, text and image, in joint attention: its Linears are te.Linear and
te.LayerNormMLP, inside te.autocast with current scaling. Eager."""

from __future__ import annotations

from functools import partial

import torch
import transformer_engine.pytorch as te
from plain import DEVICE, built, by_block, size, unchanged, uncompiled
from torch import nn
from torch.nn import functional
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

NEEDS = ("transformer_engine",)
RECIPE = "current"
WHOLE = False
LAYERS, WIDTH, HEADS = size((8, 2048, 16), (2, 256, 4))
TEXT, IMAGE, CHANNELS, BATCH = size((256, 1024, 64, 16), (16, 16, 16, 2))

linear = partial(te.Linear, params_dtype=torch.bfloat16)


class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.mlp = te.LayerNormMLP(WIDTH, 4 * WIDTH, params_dtype=torch.bfloat16)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def before(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        shift, scale, _ = self.modulation(functional.silu(given))[:, None].chunk(3, -1)
        return self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, HEADS, -1))

    def after(self, x: torch.Tensor, mixed: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        gate = self.modulation(functional.silu(given))[:, None].chunk(3, -1)[2]
        x = x + gate * self.out(mixed)
        return x + self.mlp(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Stream(), Stream()

    def forward(
        self, text: torch.Tensor, image: torch.Tensor, given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.cat((self.text.before(text, given), self.image.before(image, given)), 1)
        mixed = (
            functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2)
        )
        text = self.text.after(text, mixed[:, :TEXT], given)
        return text, self.image.after(image, mixed[:, TEXT:], given)


class MMDiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8, self.recipe = True, Float8CurrentScaling()
        self.patches, self.positions = nn.Linear(CHANNELS, WIDTH), nn.Embedding(IMAGE, WIDTH)
        self.times = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS)

    def forward(self, latents: torch.Tensor, text: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        image, given = self.patches(latents) + self.positions.weight, self.times(times)
        with te.autocast(enabled=self.fp8, recipe=self.recipe):
            for block in self.blocks:
                text, image = block(text, image, given)
        return self.last(self.norm(image)) + 0 * text.mean()


def in_bf16(model: MMDiT) -> MMDiT:
    model.fp8 = False
    return model


def with_recipe(model: MMDiT, recipe: Recipe) -> MMDiT:
    model.recipe = recipe
    return model


VARIANTS = {
    "as_is": unchanged,
    "bf16": lambda model: in_bf16(uncompiled(model)),
    "bf16_compiled": lambda model: by_block(in_bf16(model), ("blocks",)),
    "compile-blocks": partial(by_block, lists=("blocks",)),
    "te-delayed": partial(with_recipe, recipe=DelayedScaling()),
    "te-block": partial(with_recipe, recipe=Float8BlockScaling()),
}


def build_model() -> nn.Module:
    with built():
        return MMDiT()


def example_batch() -> dict[str, torch.Tensor]:
    sizes = {"latents": (IMAGE, CHANNELS), "text": (TEXT, WIDTH), "times": (WIDTH,)}
    return {
        name: torch.randn(BATCH, *sides, device=DEVICE, dtype=torch.bfloat16) for name, sides in sizes.items()
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["latents"].float())
