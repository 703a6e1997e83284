"""FP8 that was wanted and that the model which trains does not have, seen from its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, train

ALL = WARMUP + STEPS + PROFILED


def report(heard: Heard) -> Document:
    return diagnose(heard.facts)


def titles(heard: Heard) -> dict[str, str]:
    return {each.code: each.title for each in report(heard).findings}


def test_a_copy_that_was_converted(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    converted = convert_to_float8_training(copy.deepcopy(model))
    train(model, ALL)
    assert converted is not model
    (finding,) = (each for each in report(heard).findings if each.code == "MOD001")
    assert "belong to a copy" in finding.explanation
    assert report(heard).verdict.status == "fp8_not_engaged"
    assert report(heard).prescription[0].code == "MOD001"


def frozen(model: nn.Module) -> object:
    return model.requires_grad_(False)


def evaluated(model: nn.Module) -> object:
    return model.eval()


def optimized(model: nn.Module) -> object:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("on_purpose", [frozen, evaluated, optimized])
def test_a_copy_that_was_converted_on_purpose(
    observer: ScriptObserver, heard: Heard, on_purpose: Callable[[nn.Module], object]
) -> None:
    model = Net()
    other = convert_to_float8_training(copy.deepcopy(model))
    kept = on_purpose(other)
    train(model, ALL)
    assert kept is not None
    assert "MOD001" not in titles(heard)
    assert report(heard).verdict.status == "no_fp8"


def test_another_model_that_was_converted(observer: ScriptObserver, heard: Heard) -> None:
    other = convert_to_float8_training(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)))
    train(Net(), ALL)
    assert len(other) == 2
    assert "MOD001" not in titles(heard)


@pytest.mark.parametrize("converted", [True, False])
def test_an_argument_that_the_script_ignores(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, converted: bool
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--fp8", "--data", "/home/me/secret"])
    request.getfixturevalue("observer")
    train(convert_to_float8_training(Net()) if converted else Net(), ALL)
    if converted:
        assert "MOD001" not in titles(heard)
        return
    assert "argument --fp8" in titles(heard)["MOD001"]
    assert report(heard).verdict.status == "fp8_not_engaged"
    assert heard.facts.environment.fp8_arguments == ("--fp8",)


class Functional(Net):
    """Multiplies in FP8 without a layer of FP8, as nanochat does."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        eight = x.detach().to(torch.float8_e4m3fn)
        one = torch.ones(1)
        torch._scaled_mm(eight, eight.new_zeros(16, 16).t(), one, one, out_dtype=torch.bfloat16)
        return super().forward(x, scale)


def test_fp8_that_is_no_layer(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--fp8"])
    request.getfixturevalue("observer")
    train(Functional(), ALL)
    assert heard.facts.observed.fp8_gemms
    assert "MOD001" not in titles(heard)
