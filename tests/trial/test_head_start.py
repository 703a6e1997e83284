"""Where the host's head start begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fp8doctor.trial.copies.compiling import before_compiled


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def in_place(model: nn.Module) -> nn.Module:
    for block in model.children():
        block.compile(backend="eager")
    return model


def wrapped(model: nn.Sequential) -> nn.Module:
    for number, block in enumerate(model):
        model[number] = torch.compile(block, backend="eager")
    return model


def by_method(model: nn.Module) -> nn.Module:
    for block in model.children():
        block.forward = torch.compile(block.forward, backend="eager")
    return model


def whole(model: nn.Module) -> nn.Module:
    in_place(model)
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("compiled", "calls"), [(in_place, 3), (wrapped, 3), (by_method, 3), (whole, 1), (nn.Sequential, 0)]
)
def test_what_is_compiled_is_preceded_and_not_compiled_anew(
    compiled: Callable[[nn.Module], nn.Module], calls: int
) -> None:
    torch._dynamo.reset()
    model, called, x = compiled(blocks()), [], torch.randn(2, 4)
    expected = model(x)
    marks = [dict(module.__dict__) for module in model.modules()]
    frames = counters["stats"]["unique_graphs"]
    with before_compiled(model, lambda: called.append(torch.compiler.is_compiling())):
        assert torch.equal(model(x), expected)
    assert called == [False] * calls
    assert torch.equal(model(x), expected)
    assert counters["stats"]["unique_graphs"] == frames
    assert [dict(module.__dict__) for module in model.modules()] == marks
