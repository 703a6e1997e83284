"""What the observer tells of a loop's steps: calls, micro-batches, losses, waits, times, and what ran."""

import threading
import weakref
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, Slow, train

OWN = torch.autograd.backward
ALL = WARMUP + STEPS + PROFILED
N = 4
"""Micro-batches of a step."""


class Recomputed(Net):
    """Runs a backward inside of the backward."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output: torch.Tensor = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
        return output


def every_nth(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As in karpathy/nanoGPT's train.py (3adf61e): an evaluation before, autocast, a scaler, clipping."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(N * ALL):
        x = torch.randn(8, 16)
        if step % N == 0:
            with torch.no_grad():
                model.eval()(x)
            model.train()
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
            (mse_loss(model(torch.randn(8, 16)), model(torch.randn(8, 16))) / N).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "loop", "calls"), [(Net, every_nth, N), (Recomputed, every_nth, N), (Net, two_towers, 2 * N)]
)
def test_the_micro_batches_of_a_step(
    kind: type[Net], loop: Any, calls: int, observer: ScriptObserver, heard: Heard
) -> None:
    """A step is what the optimizer takes, however the loop is written."""
    model = kind()
    loop(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert observer.done
    facts = heard.facts
    assert (facts.observed.calls, facts.observed.backwards) == (calls, N)
    assert len(facts.observed.steps_ms) == STEPS
    assert facts.workload.accumulate == calls
    assert torch.autograd.backward is OWN


class WithLoss(Net):
    """Puts the loss into its output, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        loss = super().forward(x).pow(2).mean()
        self.losses.append(loss.item())
        return {"loss": loss}


def test_the_losses_of_the_models_output(observer: ScriptObserver, heard: Heard) -> None:
    """As they were when the model gave them: what the script writes into them afterwards is its own."""
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(WARMUP + STEPS, 8, 16):
        parts = [model(half)["loss"] for half in x.chunk(2)]
        for part in parts:
            part /= 2
        torch.stack(parts).sum().backward()
        optimizer.step()
    pairs = zip(model.losses[0::2], model.losses[1::2], strict=True)
    assert heard.facts.observed.losses == pytest.approx([(a + b) / 2 for a, b in pairs][WARMUP:])


def test_no_loss_is_kept_alive(observer: ScriptObserver) -> None:
    model, losses = WithLoss(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(WARMUP + 1, 8, 16):
        loss = model(x)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(weakref.ref(loss))
    del loss
    assert observer.window is not None
    assert [each() for each in losses] == [None] * (WARMUP + 1)


def test_waiting_for_data(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    batches = iter(DataLoader(Slow(), batch_size=4))
    train(model, WARMUP + STEPS, call=lambda x: model(next(batches)))
    seen = heard.facts.observed
    assert seen.data_ms is not None
    assert seen.before_forward_ms is not None
    for wait, before, step in zip(seen.data_ms, seen.before_forward_ms, seen.steps_ms, strict=True):
        assert 8 <= wait <= before <= step
    assert DataLoader.__module__ in type(batches).__next__.__module__


def test_what_a_step_ran(observer: ScriptObserver, heard: Heard) -> None:
    train(Net(), WARMUP + STEPS + PROFILED)
    seen = heard.facts.observed
    assert (seen.fp8_gemms, seen.graphs_run, seen.host_copies_ms) == (0, 0, 0)
    gemms = [each for each in seen.breakdown.groups if each.family == "gemm_fp32"]
    assert sum(each.count for each in gemms) == 4 + 4 + 3  # the first layer's input needs no gradient


def test_a_training_in_another_thread(observer: ScriptObserver, heard: Heard) -> None:
    """Its script imported torch in the main thread."""
    thread = threading.Thread(target=train, args=(Net(), WARMUP + STEPS))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    seen = heard.facts.observed
    assert (seen.calls, seen.backwards) == (1, 1)
    assert seen.losses is not None
