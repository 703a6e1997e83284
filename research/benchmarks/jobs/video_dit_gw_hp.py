"""A video diffusion transformer in the manner of Wan, FP8 by rowwise_with_gw_hp, every block compiled.

The layers of the modulation see one row a sample, and are converted like all others in the blocks:
rowwise_with_gw_hp takes any number of rows.
"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

RECIPE = "rowwise_with_gw_hp"
LAYERS, WIDTH, INNER, HEADS = size((12, 1536, 8960, 12), (2, 64, 128, 4))
BATCH, VIDEO, TEXT, CHANNELS = size((4, 2048, 256, 64), (2, 32, 16, 16))
SKIP = ("video_in", "text_in", "time_in", "head")
VARIANTS = changes("blocks", skip=SKIP)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_k, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.norm_q(self.to_q(x)), self.norm_k(self.to_k(of)), self.to_v(of))
        )
        return self.to_out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.attention, self.cross_attention = Attention(), Attention()
        self.cross_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, text: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(functional.silu(condition))[:, None].chunk(6, dim=-1)
        normed = functional.layer_norm(x, (WIDTH,)) * (1 + parts[1]) + parts[0]
        x = x + parts[2] * self.attention(normed, normed)
        x = x + self.cross_attention(self.cross_norm(x), text)
        normed = functional.layer_norm(x, (WIDTH,)) * (1 + parts[4]) + parts[3]
        return x + parts[5] * self.down(functional.gelu(self.up(normed), approximate="tanh"))


class VideoTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.video_in, self.text_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.time_in = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, noisy: torch.Tensor, prompt: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x, text, condition = self.video_in(noisy), self.text_in(prompt), self.time_in(time)
        for block in self.blocks:
            x = block(x, text, condition)
        return self.head(x)


def build_model() -> nn.Module:
    with built():
        model = to_float8(VideoTransformer(), RECIPE, skip=SKIP)
    for block in model.blocks:
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    return {
        "noisy": noise(BATCH, VIDEO, CHANNELS),
        "prompt": noise(BATCH, TEXT, WIDTH),
        "time": noise(BATCH, WIDTH),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["noisy"].float())
