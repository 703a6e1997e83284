"""What the observer tells of a loop's steps: calls, micro-batches, losses, waits, times, and what ran."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, Slow, train


def test_micro_batches(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    train(model, WARMUP + STEPS, call=lambda x: model(x) + model(x[:4]).mean())
    assert heard.facts.observed.calls == 2
    assert heard.facts.workload.accumulate == 2


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


def test_losses_that_are_shares_of_a_steps_loss(observer: ScriptObserver, heard: Heard) -> None:
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = torch.randn(WARMUP + STEPS, 8, 16)
    for x in batches:
        for half in x.chunk(2):
            model(half, num_items_in_batch=x.numel())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [model.net(x).pow(2).mean().item() for x in batches[WARMUP:]]
    assert heard.facts.observed.losses == pytest.approx(whole)


def test_losses_of_a_loop_with_its_own_loss_function(observer: ScriptObserver, heard: Heard) -> None:
    model, losses = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert heard.facts.observed.losses == pytest.approx(losses[WARMUP:])


def test_a_loss_that_is_no_number(observer: ScriptObserver, heard: Heard) -> None:
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(WARMUP + STEPS):
        x = torch.full((8, 16), float("nan") if step == WARMUP + 1 else 1.0)
        model(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    losses = heard.facts.observed.losses
    assert losses is not None
    assert [each is None for each in losses] == [False, True, True]  # a rate of 0 times NaN is NaN


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


@pytest.mark.slow
def test_a_checkpointed_model_is_called_once(observer: ScriptObserver, heard: Heard) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(self.model, x, use_reentrant=False)
            return output

    train(Outer(), WARMUP + STEPS)
    assert heard.facts.observed.calls == 1


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
    assert facts.workload.note is not None
    assert "closure" in facts.workload.note
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


class Work:
    """Stands in for the module ``time`` of the window's clock: it goes on where a script works."""

    def __init__(self) -> None:
        self.done_ms = 0.0

    def takes(self, ms: float) -> None:
        self.done_ms += ms

    def perf_counter(self) -> float:
        return self.done_ms / 1e3


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr("fp8doctor.running.step_window.time", work)
    return work


def test_a_step_is_all_its_micro_batches(observer: ScriptObserver, heard: Heard, work: Work) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS):
        for rows in (8, 8, 4):
            model(torch.randn(rows, 16)).pow(2).mean().backward()
            work.takes(10)
        work.takes(5)
        optimizer.step()
        optimizer.zero_grad()
    assert heard.facts.observed.steps_ms == pytest.approx((35,) * STEPS)
    assert heard.facts.workload.accumulate == 3


@pytest.mark.parametrize("steps_of_small", [1, 2])
def test_a_step_is_that_of_the_larger_of_two_models(
    steps_of_small: int, observer: ScriptObserver, heard: Heard, work: Work
) -> None:
    large, small = Net(3), Net(1)
    of_large = torch.optim.SGD(large.parameters(), lr=0.01)
    of_small = torch.optim.SGD(small.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS):
        for _ in range(steps_of_small):
            train(small, 1, optimizer=of_small)
            work.takes(7)
        train(large, 1, optimizer=of_large)
        work.takes(10)
    assert heard.facts.observed.steps_ms == pytest.approx((10 + 7 * steps_of_small,) * STEPS)
    assert len(heard.facts.network.linears) == 6


def test_two_optimizers_of_a_model_take_one_step(observer: ScriptObserver, heard: Heard, work: Work) -> None:
    model = Net()
    both = [torch.optim.SGD(model.blocks[at].parameters(), lr=0.01) for at in (0, 1)]
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        for each in both:
            work.takes(6)
            each.step()
            each.zero_grad()
    assert heard.facts.observed.steps_ms == pytest.approx((12,) * STEPS)
    assert heard.facts.observed.calls == 1
