"""One process of several is inspected while the others run on: nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8doctor import inspect_model
from fp8doctor.facts.arm_names import Reason
from tests.checks.distributed.sharded import blocks, processes

X = torch.ones(4, 64)


class Talking(nn.Module):
    """It averages over all processes in its forward, as a loss over gathered features does."""

    heard = 0
    """Times that the others answered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        Talking.heard += 1
        out: torch.Tensor = self.layer(x - mean)
        return out


class DeepSpeedEngine(nn.Module):
    """Stands in for DeepSpeed's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


def split() -> nn.Module:
    """Two Linears of which each process has a half."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(blocks()[0], init_device_mesh("cpu", (2,)), plan)


@pytest.mark.parametrize(
    ("make", "named"),
    [(split, "weight"), (DeepSpeedEngine, "DeepSpeedEngine"), (Talking, "c10d.allreduce_.default")],
)
def test_what_needs_the_other_processes_is_not_begun(make: Callable[[], nn.Module], named: str) -> None:
    Talking.heard = 0
    with processes(2):
        model = make()
        x = X.to(next(model.parameters()).dtype)
        trial = inspect_model(model, (x,), device="cpu", budget_s=5).facts.trial
    assert (trial.arms, trial.why) == ((), Reason.NOT_REPLICABLE)
    assert named in trial.reason
    assert Talking.heard == 0
