"""A step is what the optimizer takes: its micro-batches are counted, however the loop is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from fp8doctor.answer.job import model as described
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard

OWN = torch.autograd.backward

WIDTH, N = 32, 4
ALL = WARMUP + STEPS + PROFILED


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.up(x).relu())
        return output


class Recomputed(Net):
    """Runs a backward inside of the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
        return output


def batch() -> torch.Tensor:
    return torch.randn(16, WIDTH)


def every_nth(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As in karpathy/nanoGPT's train.py (3adf61e): an evaluation before, autocast, a scaler, clipping."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(N * ALL):
        if step % N == 0:
            with torch.no_grad():
                model.eval()(batch())
            model.train()
        x = batch()
        with torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = mse_loss(model(x), x) / N
        scaler.scale(loss).backward()
        if (step + 1) % N == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


def two_towers(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Calls the model twice for each backward, as an embedding model with queries and documents."""
    for _ in range(ALL):
        for _ in range(N):
            (mse_loss(model(batch()), model(batch())) / N).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "loop", "calls", "backwards", "told"),
    [
        (Net, every_nth, N, N, "16 rows in each of 4 micro-batches"),
        (Recomputed, every_nth, N, N, "16 rows in each of 4 micro-batches"),
        (Net, two_towers, 2 * N, N, "16 rows in each of 8 calls (4 micro-batches)"),
    ],
)
def test_the_micro_batches_of_a_step(
    kind: type[nn.Module],
    loop: Callable[[Any, torch.optim.Optimizer], None],
    calls: int | None,
    backwards: int | None,
    told: str,
    observer: ScriptObserver,
    heard: Heard,
) -> None:
    model = kind()
    loop(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert observer.done
    assert torch.autograd.backward is OWN
    facts = heard.facts
    assert (facts.observed.calls, facts.observed.backwards) == (calls, backwards)
    assert len(facts.observed.steps_ms) == STEPS
    assert facts.workload.accumulate == (calls or N)
    assert told in described(facts)
    assert diagnose(facts).verdict.status == "no_fp8"
