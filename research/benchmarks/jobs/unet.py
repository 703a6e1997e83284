"""A U-Net in the manner of Stable Diffusion: the Linears of its attention blocks in FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

CHANNELS, HEAD, TEXT, WORDS = size(((320, 640, 1280), 64, 768, 77), ((32, 64, 64), 16, 32, 16))
BATCH, SIDE, LATENT, GROUPS = size((16, 64, 4, 32), (2, 16, 4, 8))
TIME = 4 * CHANNELS[0]
SKIP = ("time",)
VARIANTS = changes(skip=SKIP)  # no level has the width of another


class Residual(nn.Module):
    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, inward), nn.GroupNorm(GROUPS, outward)
        self.conv1 = nn.Conv2d(inward, outward, 3, padding=1)
        self.conv2 = nn.Conv2d(outward, outward, 3, padding=1)
        self.time = nn.Linear(TIME, outward)
        self.skip = nn.Conv2d(inward, outward, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inner = self.conv1(functional.silu(self.norm1(x))) + self.time(time)[..., None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(inner)))


class Attention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for each in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself, self.text = Attention(width, width), Attention(width, TEXT)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = image.flatten(2).transpose(1, 2)
        normed = self.norms[0](x)
        x = x + self.itself(normed, normed)
        x = x + self.text(self.norms[1](x), text)
        value, gate = self.up(self.norms[2](x)).chunk(2, dim=-1)
        x = x + self.down(value * functional.gelu(gate))
        return image + x.transpose(1, 2).reshape(image.shape)


class Level(nn.Module):
    def __init__(self, inward: int, outward: int, after: nn.Module) -> None:
        super().__init__()
        self.residual, self.attention = Residual(inward, outward), Transformer(outward)
        self.after = after

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.attention(self.residual(x, time), text)
        return x, self.after(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second, third = CHANNELS
        self.time = nn.Sequential(nn.Linear(256, TIME), nn.SiLU(), nn.Linear(TIME, TIME), nn.SiLU())
        self.conv_in, self.conv_out = (
            nn.Conv2d(LATENT, first, 3, padding=1),
            nn.Conv2d(first, LATENT, 3, padding=1),
        )
        self.down = nn.ModuleList(
            Level(inward, outward, nn.Conv2d(outward, outward, 3, stride=2, padding=1))
            for inward, outward in ((first, first), (first, second), (second, third))
        )
        self.middle = Level(third, third, nn.Upsample(scale_factor=2))
        self.up = nn.ModuleList(
            Level(inward, outward, after)
            for inward, outward, after in (
                (2 * third, second, nn.Upsample(scale_factor=2)),
                (2 * second, first, nn.Upsample(scale_factor=2)),
                (2 * first, first, nn.Identity()),
            )
        )

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        condition, x, kept = self.time(time), self.conv_in(noisy), []
        for level in self.down:
            before, x = level(x, condition, text)
            kept.append(before)
        _, x = self.middle(x, condition, text)
        for level in self.up:
            _, x = level(torch.cat((x, kept.pop()), dim=1), condition, text)
        return self.conv_out(x)


def build_model() -> nn.Module:
    with built():
        return to_float8(UNet(), skip=SKIP)


def example_batch() -> dict[str, torch.Tensor]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    return {
        "noisy": noise(BATCH, LATENT, SIDE, SIDE),
        "time": noise(BATCH, 256),
        "text": noise(BATCH, WORDS, TEXT),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(output.float(), batch["noisy"].float())
