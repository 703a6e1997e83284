"""Compiled FP8 blocks whose activations neither an H100 nor an H200 would hold (about 165 GiB against 47 with
checkpointing): every block is checkpointed, as it has to be. With half of the rows an H200 holds them, 95 GiB
measured."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchao.float8 import convert_to_float8_training

MUST: tuple[str, ...] = ()
MUST_NOT = ("CKP001", "CKP002", "CMP001", "CMP002", "MOD001", "SHP001")
SILENT = True

WIDTH, HIDDEN, ROWS = 2048, 8192, 81920


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_model(layers: int = 96) -> nn.Module:
    with torch.device("cuda"):
        model = convert_to_float8_training(Model(layers).bfloat16())
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    for block in model.blocks:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.mean()
