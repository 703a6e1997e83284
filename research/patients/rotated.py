"""FP8 Linears of the user's own, compiled, that rotate input and weight before they are rounded, as research
on outliers does: the rotations are GEMMs that BF16 training does not have, and no check knows of them."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

MUST = ()
MUST_NOT = ("CMP001", "CMP002", "CMP003", "MOD001", "SHP001")

WIDTH = 4096


class Rotated(Float8Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned, weight = x @ self.rotation, self.weight @ self.rotation
        return matmul_with_hp_or_float8_args.apply(turned, weight.t(), self.linear_mm_config, self.config)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_model(layers: int = 6) -> nn.Module:
    with torch.device("cuda"):
        model = convert_to_float8_training(Model(layers).bfloat16())
        rotation = nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)).bfloat16()
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = Rotated
            module.register_buffer("rotation", rotation, persistent=False)
    for block in model.blocks:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(8192, WIDTH, device="cuda", dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()
