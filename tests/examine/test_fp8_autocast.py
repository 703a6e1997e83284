"""Whether a step opens Transformer Engine's autocast is seen in a forward, or is unknown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8doctor.facts import recorded
from fp8doctor.report import Report
from tests.checks.environment.live import outcome_of
from tests.looked import looked
from tests.stand_ins import transformer_engine as te

TEACHER = nn.Linear(32, 32)
CONTEXT = contextlib.nullcontext()


class Opening(nn.Module):
    """A forward of the user's own that opens the autocast in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=te.Float8CurrentScaling()):
            return self.layer(x)


def plain(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        wanted = TEACHER(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.mse_loss(model(batch), wanted)


def opens(model: Any, batch: Any) -> Any:
    with te.autocast(recipe=te.Float8CurrentScaling()):
        return model(batch).sum()


def runs_no_layer(model: Any, batch: Any) -> Any:
    return batch.sum()


def closes(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=False):
        return model(batch).sum()


def in_some_context(model: Any, batch: Any) -> Any:
    with CONTEXT:
        return model(batch).sum()


def of(model: nn.Module, step: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch) -> Report:
    te.install(monkeypatch)
    return looked(model, torch.ones(16, 32), training_step=step)


def outcome(report: Report) -> str:
    return outcome_of("fp8-never-engaged", report.facts).outcome


@pytest.mark.slow
def test_a_step_that_opens_no_autocast_runs_its_layers_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)), plain, monkeypatch)
    finding = next(each for each in report.findings if each.code == "MOD002")
    assert finding.title == "The training step opens no FP8 autocast around 2 Transformer Engine layers"
    assert report.verdict.status == "fp8_not_engaged"


@pytest.mark.slow
def test_a_step_that_opens_one_is_left_to_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), opens, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.slow
def test_so_is_a_forward_that_opens_one(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(nn.Sequential(Opening()), plain, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.slow
@pytest.mark.parametrize("step", [in_some_context, closes])
def test_another_context_is_none(monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert report.facts.training.fp8_autocast is False


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, runs_no_layer])
def test_without_a_forward_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any] | None
) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert not recorded(report.facts, "training.fp8_autocast")
    assert outcome(report) == "unknown"


@pytest.mark.slow
def test_so_is_a_step_around_which_one_is_open_now(monkeypatch: pytest.MonkeyPatch) -> None:
    library = te.install(monkeypatch)
    with library.autocast(recipe=te.Float8CurrentScaling()):
        report = of(nn.Sequential(te.Linear(32, 32)), plain, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


class Layered(nn.Module):
    """A forward that opens nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.Linear(32, 32)
        self.runner: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def hooked() -> nn.Module:
    made = Layered()
    made.register_forward_pre_hook(lambda module, given: te.autocast().__enter__())
    return made


@pytest.mark.slow
def test_a_hook_that_opens_one_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(hooked(), plain, monkeypatch)
    assert not recorded(report.facts, "training.fp8_autocast")
    assert outcome(report) == "unknown"


class NeedsGpu(nn.Module):
    """As ``te.TransformerLayer``, it runs on no fake tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs a GPU")


@pytest.mark.slow
def test_a_layer_that_no_fake_tensor_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(of(nn.Sequential(te.Linear(32, 32), NeedsGpu()), plain, monkeypatch)) == "unknown"
