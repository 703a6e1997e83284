"""A GPU that is free in pieces: the allocator had to give its whole cache back before the model found
room."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

MUST = ("MEM002",)
MUST_NOT = ("MOD001", "CMP001", "SHP001")

PIECES = 64


def leave_it_in_pieces() -> None:
    """Cache nearly all of the GPU in small pieces, then ask for more than any of them, as a longer batch
    does."""
    free, _ = torch.cuda.mem_get_info()
    pieces = [torch.empty(free // PIECES, dtype=torch.uint8, device="cuda") for _ in range(PIECES - 4)]
    del pieces
    torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def build_model() -> nn.Module:
    leave_it_in_pieces()
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).bfloat16().cuda()
    return torch.compile(convert_to_float8_training(model))


def example_batch() -> torch.Tensor:
    return torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
