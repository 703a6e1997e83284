"""Small models in FP8 for the checks of numerics: weights with structure, and blocks that break FP8 in one
way each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

WIDTH = 64


class Block(nn.Module):
    """A residual MLP; ``between`` sees what its second layer is fed with."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = nn.functional.silu(self.up(self.norm(x)))
        return x + self.down(self.between(inside) if self.between else inside)


class Overflowing(Float8Linear):
    """A stand-in for a cast that does not saturate, as torch's own up to 2.11: what is too large for E5M2
    becomes infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = (x.float() * 1e6).to(torch.float8_e5m2)
        return super().forward((cast.float() / 1e6).to(x.dtype))


def decoder(*between: Callable[[torch.Tensor], torch.Tensor] | None) -> nn.Module:
    """One block for each argument, in BF16, with rows of different size as training leaves them."""
    torch.manual_seed(0)
    model = nn.Sequential(*map(Block, between))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(torch.rand(module.out_features, 1) * 2 + 0.1)
    return model.bfloat16()


def in_fp8(model: nn.Module) -> nn.Module:
    """Converted by torchao, every Linear."""
    return convert_to_float8_training(model)


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def one_outlier(x: torch.Tensor) -> torch.Tensor:
    """One element ten million times as large as the rest."""
    largest = torch.zeros_like(x)
    largest[0, 0] = 1e7
    return x + largest


def outlier_channels(x: torch.Tensor) -> torch.Tensor:
    """Two channels a hundred and three hundred times as large, as trained language models have them."""
    factors = torch.ones(x.shape[-1], dtype=x.dtype)
    factors[3], factors[77] = 100, 300
    return x * factors


def massive_token(x: torch.Tensor) -> torch.Tensor:
    """One token 3000 times as large, as the first one of trained language models is."""
    factors = torch.ones(x.shape[0], 1, dtype=x.dtype)
    factors[0] = 3000
    return x * factors
