"""Whether a step names Transformer Engine's autocast is read from its code, or is unknown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8doctor import inspect_model
from fp8doctor.facts import recorded
from fp8doctor.report import Report
from tests.stand_ins import transformer_engine as te

TEACHER = nn.Linear(32, 32)
CONTEXT = contextlib.nullcontext()


class Engine:
    """Of some framework: what its step opens is not read."""

    def __call__(self, model: Any, batch: Any) -> Any:
        return model(batch).sum()


ENGINE = Engine()


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


def calls_one_that_opens(model: Any, batch: Any) -> Any:
    return opens(model, batch)


def through_an_engine(model: Any, batch: Any) -> Any:
    return ENGINE(model, batch)


def in_some_context(model: Any, batch: Any) -> Any:
    with CONTEXT:
        return model(batch).sum()


def of(model: nn.Module, step: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch) -> Report:
    te.install(monkeypatch)
    return inspect_model(model, torch.ones(16, 32), training_step=step, trial=False)


def outcome(report: Report) -> str:
    return next(each.outcome for each in report.outcomes if each.code == "MOD002")


def test_a_step_that_names_no_autocast_runs_its_layers_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)), plain, monkeypatch)
    finding = next(each for each in report.findings if each.code == "MOD002")
    assert finding.title == "the training step opens no FP8 autocast around 2 Transformer Engine layers"
    assert report.verdict.status == "fp8_not_engaged"


@pytest.mark.parametrize("step", [opens, calls_one_that_opens])
def test_a_step_that_names_one_is_left_to_the_trial(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any]
) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


def test_so_is_a_forward_that_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    report = of(nn.Sequential(Opening()), plain, monkeypatch)
    assert report.facts.training.fp8_autocast is True
    assert outcome(report) == "not_applicable"


@pytest.mark.parametrize("step", [None, through_an_engine, in_some_context])
def test_what_cannot_be_read_is_unknown(
    monkeypatch: pytest.MonkeyPatch, step: Callable[..., Any] | None
) -> None:
    report = of(nn.Sequential(te.Linear(32, 32)), step, monkeypatch)
    assert not recorded(report.facts, "training.fp8_autocast")
    assert outcome(report) == "unknown"


def test_a_model_without_such_layers_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of(nn.Linear(32, 32), plain, monkeypatch).facts.training.fp8_autocast is None
