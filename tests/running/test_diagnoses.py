"""Jobs that are misconfigured the way people do it, diagnosed from their own steps, without a trial."""

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
from tests.running.loops import Block, Net, train

ALL = WARMUP + STEPS + PROFILED


@pytest.fixture
def report(observer: ScriptObserver, heard: Heard) -> Callable[..., Document]:
    """Train a model, and diagnose it.

    The window opens later if a step compiles, as what other tests left in the compiler can cause.
    """

    def of(model: nn.Module, call: Callable[..., Any] | None = None) -> Document:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(LONGEST_WARMUP * WARMUP + STEPS + PROFILED):
            if not observer.done:
                train(model, 1, call=call, optimizer=optimizer)
        assert observer.done
        return diagnose(heard.facts)

    return of


class Fused(nn.Module):
    """A block that reads the weight of its layer, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.up.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "compiled", "ran"),
    [
        ((Fused, Fused), False, 0),
        ((Block, Block), False, 12),
        ((Block, Block), True, 11),  # the compiler leaves the gradient of the input out
    ],
)
def test_layers_that_run_or_never_do(
    layers: tuple[type[nn.Module], ...],
    compiled: bool,
    ran: int,
    report: Callable[..., Document],
    heard: Heard,
) -> None:
    model = convert_to_float8_training(nn.Sequential(*(each() for each in layers)))
    for block in model if compiled else ():
        block.compile()
    found = report(model, lambda x: model(x.repeat(2, 1)))
    assert heard.facts.observed.fp8_gemms == ran
    assert (found.verdict.status == "fp8_not_engaged") is (ran == 0)
    assert ("fp8-never-engaged" in {each.name for each in found.findings}) is (ran == 0)


def test_another_model_that_was_converted(report: Callable[..., Document]) -> None:
    other = convert_to_float8_training(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)))
    assert "MOD001" not in {each.code for each in report(Net()).findings}
    assert len(other) == 2


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
    found = request.getfixturevalue("report")(Functional())
    assert heard.facts.observed.fp8_gemms
    assert "MOD001" not in {each.code for each in found.findings}


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


@pytest.mark.parametrize("call", [beside, past])
@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiled_model_that_no_step_calls(
    call: Callable[[Any], Any], report: Callable[..., Document], heard: Heard
) -> None:
    model = convert_to_float8_training(Net())
    finding = next(each for each in report(model, call(model)).findings if each.code == "CMP002")
    assert finding.treatment is not None
    assert (finding.treatment.name, finding.evidence["idle_fp8_linears"]) == ("call-compiled-object", 4)
    assert {each.compiled for each in heard.facts.network.linears} == {None}
