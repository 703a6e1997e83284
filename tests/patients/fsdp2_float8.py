"""FSDP2 as torchao wants it, the first of eight processes after one step: FP8 all-gather, scales computed in
one call.

torch's own fake process group answers for the seven that are not there.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

MUST: tuple[str, ...] = ()
MUST_NOT = ("DST001", "CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "STP004")
SILENT = True

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A residual block of two wide Linears."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def sharded(all_gather: bool, layers: int = 2) -> nn.Sequential:
    """The model of the first process of eight."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with torch.device(DEVICE):
        model = nn.Sequential(*(Block() for _ in range(layers))).bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that took one step, on gradients of zero: FP8 GEMMs of this size take minutes on a CPU."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(all_gather=True)
    optimizer = stepped(model)
    precompute_float8_dynamic_scale_for_fsdp(model)
    for block in model:
        block.compile()
    return model, optimizer


def example_batch() -> torch.Tensor:
    return torch.zeros(8192, 2048, dtype=torch.bfloat16, device=DEVICE)
