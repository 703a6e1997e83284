"""A Conformer with CTC on 20 s of speech: fp32 weights under autocast to BF16, fused AdamW; its feed-forward
Linears in tensorwise FP8 by a filter, every block compiled."""

from __future__ import annotations

import torch
from plain import DEVICE, by_block, changes, size, to_float8
from torch import nn
from torch.nn import functional

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, HEADS, KERNEL = size((12, 1024, 16, 31), (2, 64, 4, 7))
MELS, FRAMES, BATCH, LETTERS, TARGET = size((80, 2048, 32, 128, 100), (16, 128, 2, 32, 8))
FILTER = ("attention", "pointwise", "head", "into")
VARIANTS = changes("layers", skip=FILTER)
autocast = torch.bfloat16


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.pointwise_in, self.pointwise_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.glu(self.pointwise_in(self.norm(x)), dim=-1).transpose(1, 2)
        x = functional.silu(self.batch_norm(self.depthwise(x))).transpose(1, 2)
        return self.pointwise_out(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = FeedForward(), Attention()
        self.convolution, self.second = Convolution(), FeedForward()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x)
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.second(x))


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subsampled = nn.Sequential(
            nn.Conv2d(1, WIDTH // 4, 3, 2, 1),
            nn.SiLU(),
            nn.Conv2d(WIDTH // 4, WIDTH // 4, 3, 2, 1),
            nn.SiLU(),
        )
        self.into = nn.Linear(WIDTH // 4 * (MELS // 4), WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.subsampled(features[:, None]).transpose(1, 2).flatten(2)
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        told = self.head(x).float().log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(features),), len(told), dtype=torch.long, device=told.device)
        letters = torch.full((len(targets),), targets.shape[1], dtype=torch.long, device=told.device)
        return functional.ctc_loss(told, targets, frames, letters, zero_infinity=True)


def build_model() -> nn.Module:
    with torch.device(DEVICE):
        model = Conformer()
    return by_block(to_float8(model, skip=FILTER), ["layers"])


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-3, fused=DEVICE == "cuda")


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "features": torch.randn(BATCH, FRAMES, MELS, device=DEVICE),
        "targets": torch.randint(1, LETTERS, (BATCH, TARGET), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
