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


class Lora(nn.Module):
    """A frozen layer and the two matrices of its adapter, 0.6 MiB beside an FP8 layer of `WIDTH`."""

    def __init__(self, base: nn.Linear, rank: int = 128) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False).bfloat16()
        self.lora_b = nn.Linear(rank, base.out_features, bias=False).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


def blocks(width: int) -> nn.Sequential:
    """Make blocks, and a process group of this process alone."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS))).bfloat16()


def decoder(width: int, *, emulate: bool = False) -> nn.Sequential:
    return convert_to_float8_training(blocks(width), config=Float8LinearConfig(emulate=emulate))


def mx_decoder(width: int) -> nn.Sequential:
    from torchao.prototype.mx_formats import MXLinearConfig
    from torchao.quantization import quantize_

    model = blocks(width)
    quantize_(model, MXLinearConfig())
    return model


def build_model() -> nn.Module:
    return torch.compile(DistributedDataParallel(decoder(WIDTH)))


def example_batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, dtype=torch.bfloat16)
