"""Jobs that are misconfigured the way people do it, diagnosed from their own steps, without a trial."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torchao.float8 import convert_to_float8_training

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.running.observer import LONGEST_WARMUP, ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net, train

WIDTH = 32
ALL = WARMUP + STEPS + PROFILED


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
def found(observer: ScriptObserver, heard: Heard) -> Callable[..., set[str]]:
    """Train a model in BF16, and tell codes and names of what is found.

    The window opens later if a step compiles, as what other tests left in the compiler can cause.
    """

    def of(model: nn.Module) -> set[str]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(LONGEST_WARMUP * WARMUP + STEPS + PROFILED):
            if observer.done:
                break
            model(torch.ones(16, WIDTH, dtype=torch.bfloat16)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert observer.done
        return {key for each in diagnose(heard.facts).findings for key in (each.code, each.name)}

    return of


def status(heard: Heard) -> str:
    return diagnose(heard.facts).verdict.status


def test_layers_whose_weights_are_read(found: Callable[..., set[str]], heard: Heard) -> None:
    assert "fp8-never-engaged" in found(convert_to_float8_training(nn.Sequential(Fused(), Fused())))
    assert status(heard) == "fp8_not_engaged"


@pytest.mark.slow
def test_layers_that_were_converted_inside_a_compiled_wrapper(found: Callable[..., set[str]]) -> None:
    model = nn.Sequential(nn.Sequential(Block(), nn.ReLU(), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)))
    model[0][2] = torch.compile(model[0][2], backend="eager")
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "_orig_mod" in name)
    assert {"fp8-never-engaged", "hooks-or-subclass-lost"} <= found(model)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_that_run(found: Callable[..., set[str]], heard: Heard, compiled: bool) -> None:
    model = convert_to_float8_training(nn.Sequential(Block(), Block()))
    for block in model if compiled else ():
        block.compile()
    assert "fp8-never-engaged" not in found(model)
    ran = 5 if compiled else 6  # the compiler leaves the gradient of the input out
    assert heard.facts.observed.fp8_gemms == ran
    assert status(heard) != "fp8_not_engaged"


def test_a_copy_that_was_converted(observer: ScriptObserver, heard: Heard) -> None:
    model = Net()
    converted = convert_to_float8_training(copy.deepcopy(model))
    train(model, ALL)
    assert converted is not model
    report: Document = diagnose(heard.facts)
    assert report.verdict.status == "fp8_not_engaged"
    assert report.prescription[0].code == "MOD001"


def test_another_model_that_was_converted(observer: ScriptObserver, heard: Heard) -> None:
    other = convert_to_float8_training(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)))
    train(Net(), ALL)
    assert len(other) == 2
    assert "MOD001" not in {each.code for each in diagnose(heard.facts).findings}


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
    assert "MOD001" not in {each.code for each in diagnose(heard.facts).findings}


# A torch.compile whose result no training step calls


@pytest.fixture
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


def beside(model: Any) -> Any:
    """Compile a wrapper that nothing calls."""
    model.wrapper = [torch.compile(model, backend="inductor")]
    return model


def past(model: Any) -> Any:
    """Call the forward of a compiled model."""
    model.compile()
    return model.forward


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("call", "treatment"),
    [
        (beside, "use-compiled-object"),
        (past, "call-compiled-object"),
        pytest.param(wrapped, None, marks=pytest.mark.slow),
        pytest.param(in_place, None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_model(
    call: Callable[[Any], Any], treatment: str | None, observer: ScriptObserver, heard: Heard
) -> None:
    model = Net()
    convert_to_float8_training(model)
    train(model, ALL, call=call(model))
    finding = next(each for each in diagnose(heard.facts).findings if each.code == "CMP002")
    regions = {each.compiled for each in heard.facts.network.linears}
    assert finding.treatment is not None
    if treatment is None:  # no kernel is generated
        assert finding.treatment.name != "use-compiled-object"
        assert regions == {""}
    else:
        assert (finding.treatment.name, finding.evidence["idle_fp8_linears"]) == (treatment, 4)
        assert regions == {None}
        assert heard.facts.workload.tokens == (None if call is past else 8)
