"""Real FSDP2 models on a CPU. torch's own fake process group answers for the processes that are not there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.checks import models

needs_a_sharded_step = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="torch 2.6 has no torch.cpu.Stream.record_event, which fully_shard calls in a step on a CPU",
)


@contextmanager
def processes(count: int) -> Iterator[None]:
    """This process as the first of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def blocks() -> nn.Sequential:
    """Four Linears in two blocks."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))
    ).bfloat16()


def float8(all_gather: bool) -> nn.Sequential:
    return models.float8(blocks(), enable_fsdp_float8_all_gather=all_gather)  # type: ignore[no-any-return]


def shard(model: nn.Sequential) -> nn.Sequential:
    """FSDP2 around every block and the model."""
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One training step, its gradients given back."""
    model(torch.ones(16, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
