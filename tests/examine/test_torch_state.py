"""The state of Dynamo as facts."""

import sys
from typing import Any

import pytest
import torch
import torch._dynamo

from fp8doctor.examine.training_state import examine_dynamo
from fp8doctor.facts import Dynamo
from tests.examine.models import Stacked, training

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def test_dynamo_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        monkeypatch.delitem(sys.modules, name)
    off = Dynamo(disabled=False, frames_total=0, frames_ok=0)
    assert examine_dynamo({}) == off
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert examine_dynamo({}).disabled is True
    assert not any(name.startswith("torch._dynamo") for name in sys.modules)


def test_dynamo_switches() -> None:
    with torch._dynamo.config.patch(disable=True):
        assert training(Stacked()).dynamo.disabled is True


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def test_dynamo_counts_frames(fresh_dynamo: None) -> None:
    assert training(Stacked()).dynamo.frames_total == 0
    assert "frames" not in torch._dynamo.utils.counters
    model = torch.compile(Stacked(), backend="eager")
    model(TOKENS)
    facts = training(model).dynamo
    assert facts.frames_ok == facts.frames_total == torch._dynamo.utils.counters["frames"]["ok"] > 0
