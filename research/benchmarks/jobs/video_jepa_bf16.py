"""An encoder of video tubelets with a narrower predictor of its masked ones, as V-JEPA trains: two lists of
blocks of other widths, in BF16, eager, torch's AdamW as it comes. What would FP8 give?"""

from __future__ import annotations

from functools import partial

import torch
from plain import DEVICE, adamw, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

RECIPE = None
WHOLE = False
LAYERS, WIDTH, HEADS = size((14, 1408, 16), (3, 64, 4))
NARROW_LAYERS, NARROW = size((6, 768), (3, 32))
FRAMES, SIDE, TUBELET, BATCH = size((8, 14, 2 * 16 * 16 * 3, 16), (2, 4, 48, 2))
TOKENS = FRAMES * SIDE**2
SKIP = ("patches", "narrow", "widen")
VARIANTS = changes("encoder", "predictor", skip=SKIP)
VARIANTS["convert-encoder"] = partial(to_float8, skip=(*SKIP, "predictor"))
build_optimizer = adamw


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Jepa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(TUBELET, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.norm, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NARROW)
        self.asked = nn.Parameter(0.02 * torch.randn(TOKENS, NARROW))
        self.predictor = nn.ModuleList(Block(NARROW) for _ in range(NARROW_LAYERS))
        self.last, self.widen = nn.LayerNorm(NARROW), nn.Linear(NARROW, WIDTH)

    def forward(self, tubelets: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = (self.patches(tubelets) + self.positions)[:, : TOKENS // 2]
        for block in self.encoder:
            x = block(x)
        seen = self.narrow(self.norm(x))
        x = torch.cat((seen, self.asked[TOKENS // 2 :].expand(len(x), -1, -1)), 1)
        for block in self.predictor:
            x = block(x)
        return self.widen(self.last(x[:, TOKENS // 2 :]))


def build_model() -> nn.Module:
    with built():
        return Jepa()


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "tubelets": torch.randn(BATCH, TOKENS, TUBELET, device=DEVICE, dtype=torch.bfloat16),
        "targets": torch.randn(BATCH, TOKENS // 2, WIDTH, device=DEVICE, dtype=torch.bfloat16),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.smooth_l1_loss(output.float(), batch["targets"].float())
