"""A torch.compile whose result no training step calls, seen from the steps themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    assert (
        finding.title
        == "torch.compile has no effect: the training step calls the model, not the compiled one"
    )
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
    assert (
        finding.title
        == "torch.compile has no effect: the training step calls model.forward(), which is not compiled"
    )
    assert finding.treatment.code.splitlines()[0].startswith("output = model(")
    assert finding.evidence["idle_fp8_linears"] == 4
    assert {each.compiled for each in heard.facts.network.linears} == {None}


@pytest.mark.slow
def test_blocks_whose_forward_is_called(observer: ScriptObserver, heard: Heard) -> None:
    class Bypassing(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            for block in self.blocks:
                x = block.forward(x, scale)
            return x

    model = Bypassing()
    convert_to_float8_training(model)
    for block in model.blocks:
        block.compile()
    train(model, ALL)
    assert "2 torch.compile calls" in finding_of(heard).title
    assert finding_of(heard).evidence["idle_fp8_linears"] == 4


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
    assert "use-compiled-object" not in finding_of(heard).treatment.name
    assert "generates no kernel" in finding_of(heard).title
    assert {each.compiled for each in heard.facts.network.linears} == {""}


@pytest.mark.slow
def test_a_wrapper_that_is_called_first_within_the_window(observer: ScriptObserver, heard: Heard) -> None:
    """What stands before the calls of the model inside is gone before Dynamo sees it."""
    model = net()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    calls = iter([model] * (WARMUP + 1) + [compiled] * ALL)
    train(model, ALL, call=lambda x: next(calls)(x))
    assert len(graphs) == 1
    assert "_compiled_call_impl" not in vars(model)


@pytest.mark.slow
def test_a_stance_is_told_as_the_cause(observer: ScriptObserver, heard: Heard) -> None:
    model = net()
    model.compile()
    with torch.compiler.set_stance("force_eager"):
        train(model, ALL)
    assert "force_eager" in finding_of(heard).title


@pytest.mark.slow
def test_a_helper_that_is_compiled_beside_the_model(observer: ScriptObserver, heard: Heard) -> None:
    """Frames are counted, and none of them is the model's."""
    model = net()
    compiled = torch.compile(model, backend="inductor")
    helper: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x * 2, backend="eager")
    train(model, ALL, call=lambda x: model(helper(x)))
    assert compiled is not model
    assert heard.facts.training.dynamo.frames_total > 0
    assert "ran uncompiled" in finding_of(heard).title


@pytest.mark.slow
def test_a_compiled_step_around_a_wrapper(observer: ScriptObserver, heard: Heard) -> None:
    """Here no module's own code was compiled, and yet all of it runs compiled."""
    model = net()
    compiled = torch.compile(model)

    @torch.compile
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = compiled(x)
        return result

    train(model, ALL, call=loss_of)
    assert finding_of(heard) is None
