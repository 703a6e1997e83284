"""Jobs that are misconfigured the way people do it, diagnosed from their own steps, without a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torchao.float8 import convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.running.observer import LONGEST_WARMUP, ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.up(x)
        return output


class Fused(Block):
    """Reads the weight, as fused kernels do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.up.weight)


@pytest.fixture
def found(observer: ScriptObserver, heard: Heard) -> Callable[..., dict[str, str]]:
    """Train a model, and tell code -> title of what is found.

    The window opens later if a step compiles, as what other tests left in the compiler can cause.
    """

    def of(model: nn.Module, step: Callable[..., Any] | None = None) -> dict[str, str]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(LONGEST_WARMUP * WARMUP + STEPS + PROFILED):
            if observer.done:
                break
            loss = step(model) if step else model(torch.ones(16, WIDTH, dtype=torch.bfloat16)).float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert observer.done
        findings = diagnose(heard.facts).findings
        return {key: each.title for each in findings for key in (each.code, each.name)}

    return of


def test_layers_whose_weights_are_read(found: Callable[..., dict[str, str]], heard: Heard) -> None:
    titles = found(convert_to_float8_training(nn.Sequential(Fused(), Fused())))
    assert titles["fp8-never-engaged"] == "No FP8 matmul ran in a training step with 2 FP8 layers"
    assert diagnose(heard.facts).verdict.status == "fp8_not_engaged"


@pytest.mark.slow
def test_layers_that_were_converted_inside_a_compiled_wrapper(found: Callable[..., dict[str, str]]) -> None:
    model = nn.Sequential(nn.Sequential(Block(), nn.ReLU(), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)))
    model[0][2] = torch.compile(model[0][2], backend="eager")
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "_orig_mod" in name)
    titles = found(model)
    assert titles["fp8-never-engaged"] == "No FP8 matmul ran in a training step with 1 FP8 layer"
    assert "hooks-or-subclass-lost" in titles


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_that_run(found: Callable[..., dict[str, str]], heard: Heard, compiled: bool) -> None:
    model = convert_to_float8_training(nn.Sequential(Block(), Block()))
    if compiled:
        for block in model:
            block.compile()
    assert "fp8-never-engaged" not in found(model)
    ran = 5 if compiled else 6  # the compiler leaves the gradient of the input out
    assert heard.facts.observed.fp8_gemms == ran
    assert diagnose(heard.facts).verdict.status != "fp8_not_engaged"
