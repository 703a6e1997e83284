"""A diffusion transformer of the size of DiT-XL/2: adaLN-zero, FP8, each block compiled."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, BATCH, LENGTH = size((28, 1152, 16, 64, 256), (3, 64, 4, 16, 16))
CHANNELS, CLASSES = 16, 1000
SKIP = ("patch_in", "time_in", "final")
VARIANTS = changes("blocks", skip=SKIP, as_compiled=True)


def shifted(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.modulation = zero(nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(functional.silu(condition))[:, None].chunk(6, dim=-1)
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.qkv(shifted(x, parts[0], parts[1])).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + parts[2] * self.proj(mixed)
        inner = functional.gelu(self.fc1(shifted(x, parts[3], parts[4])), approximate="tanh")
        return x + parts[5] * self.fc2(inner)


def zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_in, self.class_in = nn.Linear(CHANNELS, WIDTH), nn.Embedding(CLASSES, WIDTH)
        self.time_in = nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_modulation = zero(nn.Linear(WIDTH, 2 * WIDTH))
        self.final = nn.Linear(WIDTH, CHANNELS)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = self.patch_in(noisy) + self.positions
        rates = torch.exp(-9.2 * torch.arange(128, device=time.device) / 128)
        angles = time[:, None] * rates
        condition = self.time_in(torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype))
        condition = condition + self.class_in(classes)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.final_modulation(functional.silu(condition))[:, None].chunk(2, dim=-1)
        return self.final(shifted(x, shift, scale))


def build_model() -> nn.Module:
    with built():
        model = to_float8(DiT(), skip=SKIP)
    for block in model.blocks:
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "noisy": torch.randn(BATCH, LENGTH, CHANNELS, device=DEVICE, dtype=torch.bfloat16),
        "time": 1000 * torch.rand(BATCH, device=DEVICE),
        "classes": torch.randint(0, CLASSES, (BATCH,), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["noisy"].float())
