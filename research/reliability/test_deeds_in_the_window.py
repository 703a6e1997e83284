"""What a script does with its model between two watched steps gives what it gives under Python."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from fp8doctor.running.observer import ScriptObserver
from fp8doctor.stacks.torch_private import COMPILED_CALL
from tests.running import conftest
from tests.running.conftest import STEPS, WARMUP, Heard
from tests.running.loops import train

heard, observer, stop_on_nan = conftest.heard, conftest.observer, conftest.stop_on_nan

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A class of the user's, in itself once more."""

    def __init__(self, deep: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner = Own(deep - 1) if deep else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.down(torch.relu(self.up(x))))


def compiled(model: nn.Module, **settings: Any) -> Any:
    return torch.compile(model, backend="eager", **settings)


def in_a_function(model: nn.Module) -> torch.Tensor:
    return compiled(lambda x: model(x) * 2, fullgraph=True)(X)


def compiled_in_place(model: nn.Module) -> torch.Tensor:
    twin = copy.deepcopy(model)
    twin.compile(backend="eager", fullgraph=True)
    return twin(X)


def saved_and_loaded(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(X)


def gradient_by_func(model: nn.Module) -> torch.Tensor:
    values = {name: each.detach() for name, each in model.named_parameters()}
    return torch.func.grad(lambda held: torch.func.functional_call(model, held, (X,)).sum())(values)[
        "up.weight"
    ]


DEEDS: dict[str, Callable[[Any], Any]] = {
    "compile, one graph": lambda model: compiled(model, fullgraph=True)(X),
    "compile a part": lambda model: compiled(model.inner, fullgraph=True)(X),
    "compile a function that calls it": in_a_function,
    "compile a copy in place": compiled_in_place,
    "compile its method": lambda model: compiled(model.forward, fullgraph=True)(X),
    "script": lambda model: torch.jit.script(model)(X),
    "export": lambda model: torch.export.export(model, (X,)).module()(X),
    "make_fx": lambda model: make_fx(lambda x: model(x))(X)(X),
    "vmap": lambda model: torch.vmap(model)(X),
    "func.grad": gradient_by_func,
    "deepcopy": lambda model: copy.deepcopy(model)(X),
    "pickle": lambda model: pickle.loads(pickle.dumps(model))(X),
    "save": saved_and_loaded,
    "variables": lambda model: torch.tensor([len(vars(model)), model._compiled_call_impl is None]),
    "all that it has": lambda model: torch.tensor(
        [getattr(model, name, None) is None for name in dir(model)]
    ),
}


def done(deed: Callable[[Any], Any], observer: ScriptObserver | None) -> tuple[Any, ...]:
    """The result of the deed and what Dynamo counted, in the window of an observer or without one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, WARMUP + 1, optimizer=optimizer)
    if observer is not None:
        assert observer.window is not None
        assert COMPILED_CALL in vars(Own)
    counters.clear()
    result = deed(model)
    counted = dict(counters["frames"]), dict(counters["graph_break"]), dict(counters["stats"])
    train(model, STEPS, optimizer=optimizer)
    deed(model)
    return result.tolist(), counted, dict(counters["frames"]), [each.tolist() for each in model.parameters()]


@pytest.fixture(scope="module")
def without_an_observer() -> dict[str, tuple[Any, ...]]:
    return {name: done(deed, None) for name, deed in DEEDS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEDS)
def test_a_deed_in_the_window(
    name: str, without_an_observer: dict[str, tuple[Any, ...]], observer: ScriptObserver, heard: Heard
) -> None:
    """And after it."""
    assert done(DEEDS[name], observer) == without_an_observer[name]
    assert COMPILED_CALL not in vars(Own)
    assert len(heard.facts.observed.steps_ms) == STEPS


@pytest.mark.slow
def test_compiling_does_not_end_the_watch(observer: ScriptObserver, heard: Heard) -> None:
    """A recompilation of something else is common; the batch of the last step is still looked at."""
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, WARMUP + 1, optimizer=optimizer)
    compiled(nn.Linear(16, 16))(X)
    assert COMPILED_CALL in vars(Own)
    train(model, STEPS, optimizer=optimizer)
    assert heard.facts.observed.calls == 1
