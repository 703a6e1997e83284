"""A decoder in FP8 in DistributedDataParallel of one process, compiled around it."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

WIDTH, BLOCKS = 512, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def decoder(width: int, *, emulate: bool = False) -> nn.Sequential:
    """Make blocks in FP8, and a process group of this process alone."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS))).bfloat16()
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))


def build_model() -> nn.Module:
    return torch.compile(DistributedDataParallel(decoder(WIDTH)))


def example_batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, dtype=torch.bfloat16)
