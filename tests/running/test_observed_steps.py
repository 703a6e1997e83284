"""What the observer tells of a loop's steps: calls, micro-batches, losses, waits, times, and what ran."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, Slow, train


class WithLoss(nn.Module):
    """Puts the loss into its output, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, num_items_in_batch: int | None = None) -> dict[str, torch.Tensor]:
        output = self.net(x)
        loss = (
            output.pow(2).mean() if num_items_in_batch is None else output.pow(2).sum() / num_items_in_batch
        )
        self.losses.append(loss.item())
        return {"loss": loss, "logits": output}


def half_of_two(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        parts = [model(half)["loss"] for half in x.chunk(2)]
        for part in parts:
            part /= 2
        return torch.stack(parts).sum()

    return call


def test_the_losses_of_the_models_output(observer: ScriptObserver, heard: Heard) -> None:
    """As they were when the model gave them: what the script writes into them afterwards is its own."""
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(WARMUP + STEPS, 8, 16):
        half_of_two(model)(x).backward()
        optimizer.step()
    pairs = zip(model.losses[0::2], model.losses[1::2], strict=True)
    assert heard.facts.observed.losses == pytest.approx([(a + b) / 2 for a, b in pairs][WARMUP:])


def test_no_graph_of_a_loss_is_kept_alive(observer: ScriptObserver) -> None:
    nodes = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            nodes.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    class Marked(WithLoss):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": Same.apply(super().forward(x)["loss"])}  # type: ignore[no-untyped-call]

    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(WARMUP + 1, 8, 16):
        model(x)["loss"].backward()
        optimizer.step()
    assert observer.window is not None
    assert [each() for each in nodes] == [None] * (WARMUP + 1)


def test_a_closure(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(8, 16)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(WARMUP + STEPS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    facts = heard.facts
    assert (facts.workload.batch_source, facts.workload.batch_size) == ("given", 8)
    assert len(facts.observed.steps_ms) == STEPS


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
