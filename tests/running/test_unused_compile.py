"""A torch.compile whose result no training step calls, seen from the steps themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchao.float8 import convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, train

ALL = WARMUP + STEPS + PROFILED


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin as a process does in which nothing was compiled yet."""
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    before = {key: dict(value) for key, value in counters.items()}
    counters.clear()
    torch._dynamo.reset()  # else what another test compiled for these classes would be called
    monkeypatch.setattr(convert_frame, "FRAME_COUNTER", 0)
    yield
    counters.clear()
    for key, value in before.items():
        counters[key].update(value)


def net() -> Net:
    """Return a model in FP8, whose widths FP8 takes."""
    model = Net()
    convert_to_float8_training(model)
    return model


def finding_of(heard: Heard) -> Any:
    return next((each for each in diagnose(heard.facts).findings if each.code == "CMP002"), None)


def test_a_wrapper_beside_the_model_that_is_called(observer: ScriptObserver, heard: Heard) -> None:
    model = net()
    compiled = torch.compile(model, backend="inductor")
    train(model, ALL)
    assert compiled is not model
    finding = finding_of(heard)
    assert finding.treatment.name == "use-compiled-object"
    assert finding.evidence["idle_fp8_linears"] == 4
    facts = heard.facts
    assert facts.workload.tokens == 8
    assert {each.compiled for each in facts.network.linears} == {None}


def test_a_model_whose_forward_is_called(observer: ScriptObserver, heard: Heard) -> None:
    model = net()
    model.compile()
    train(model, ALL, call=model.forward)
    finding = finding_of(heard)
    assert finding.treatment.code.splitlines()[0].startswith("output = model(")
    assert finding.evidence["idle_fp8_linears"] == 4
    assert {each.compiled for each in heard.facts.network.linears} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_compiled_model_that_is_called(observer: ScriptObserver, heard: Heard, wrapped: bool) -> None:
    model: Any = net()
    if wrapped:
        called = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
        called = model
    train(model, ALL, call=called)
    assert finding_of(heard).treatment.name == "default-backend"
    assert {each.compiled for each in heard.facts.network.linears} == {""}
