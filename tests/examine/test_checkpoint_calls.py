"""Checkpointing that a forward calls, in the forms in which libraries and users write it, against what a
backward recomputes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fp8doctor.facts import recorded
from tests.examine.models import called, network, training

BATCH = torch.ones(2, 16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.Sequential(layer(), layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x))


def in_a_row(functions: Any, x: torch.Tensor, every: int = 1, flatten: bool = False) -> torch.Tensor:
    """As timm's ``checkpoint_seq``."""

    def run(start: int, end: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for number in range(start, end + 1):
                x = functions[number](x)
            return x

        return forward

    if flatten:
        functions = itertools.chain.from_iterable(functions)
    if not isinstance(functions, (tuple, list)):
        functions = tuple(functions)
    for start in range(0, len(functions), every):
        end = min(start + every - 1, len(functions) - 1)
        x = torch_checkpoint.checkpoint(run(start, end), x, use_reentrant=False)
    return x


class LikeTimm(Stack):
    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward_features(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        if mask is not None:
            for layer in self.layers:
                x = layer(x * mask)
        elif self.grad_checkpointing and not torch.jit.is_scripting():
            x = in_a_row(self.layers, x)
        else:
            x = self.layers(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_features(x)


class Helped(Layer):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())

    def recomputed(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.recomputed(x)


class InPieces(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self.layers, 2, self.first(x), use_reentrant=False)


class Sometimes(Layer):
    """Only a run tells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


def flagged(model: LikeTimm) -> nn.Module:
    model.set_grad_checkpointing(True)
    return model


def around(layer: nn.Module) -> nn.Module:
    """A wrapper function, without ``functools.wraps``."""

    def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **settings: Any) -> Any:
            return checkpoint(function, *arguments, use_reentrant=False, **settings)

        return forward

    layer.forward = recomputed(layer.forward)
    return layer


def partial(layer: nn.Module) -> nn.Module:
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return layer


def on_layers(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Stack()
    for layer in model.layers:
        change(layer)
    return model


ON = {
    "timm": lambda: flagged(LikeTimm()),
    "helper": lambda: Stack(Helped),
    "sequential": InPieces,
    "partial": lambda: on_layers(partial),
    "wrapper": lambda: on_layers(around),
    "composable": lambda: on_layers(composable),
}
OFF = {
    "none": Stack,
    "timm": LikeTimm,
}


def recomputes(model: nn.Module) -> bool:
    """Whether a Linear runs again in the backward."""
    backward, again = [False], []

    def count(module: nn.Module, arguments: Any) -> None:
        if backward[0] and type(module) is nn.Linear:
            again.append(module)

    handle = register_module_forward_pre_hook(count)
    try:
        loss = model(torch.randn(2, 16)).sum()
        backward[0] = True
        loss.backward()
    finally:
        handle.remove()
    return bool(again)


@pytest.mark.slow
@pytest.mark.parametrize("build", ON.values(), ids=ON.keys())
def test_checkpointing_that_is_on(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert [each.active for each in called(model, BATCH).training.checkpointing][:1] == [True]
    assert recomputes(model)


@pytest.mark.parametrize("build", OFF.values(), ids=OFF.keys())
def test_checkpointing_that_is_off(build: Callable[[], nn.Module]) -> None:
    model = build()
    assert called(model, BATCH).training.checkpointing == ()
    assert not recomputes(model)


@pytest.mark.slow
def test_a_flag_is_named() -> None:
    (found,) = called(flagged(LikeTimm()), BATCH).training.checkpointing
    assert (found.name, found.form, found.flag) == ("", "called_in_forward", "grad_checkpointing")


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "active"), [(1, []), (2, [True, True])])
def test_a_call_that_depends_on_the_batch(rows: int, active: list[bool]) -> None:
    found = called(Stack(Sometimes), torch.ones(rows, 16)).training.checkpointing
    assert [each.active for each in found] == active


@pytest.mark.parametrize("batch", [None, torch.ones(2, 3)], ids=["no batch", "a batch that does not fit"])
def test_without_a_forward_it_is_unknown(batch: torch.Tensor | None) -> None:
    facts = called(flagged(LikeTimm()), batch)
    assert [each.active for each in facts.training.checkpointing] == [None]
    assert not recorded(facts.linears()[1], "checkpointed")
    assert facts.gaps["network.linears.checkpointed"]


@pytest.mark.slow
def test_the_model_stays_as_it_is() -> None:
    model = flagged(LikeTimm())
    before = {**vars(model)}, [id(each) for each in model.parameters()], torch.random.get_rng_state()
    called(model, BATCH)
    after = {**vars(model)}, [id(each) for each in model.parameters()], torch.random.get_rng_state()
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])


@pytest.mark.parametrize(("change", "form"), [(partial, "whole_forward"), (composable, "composable")])
def test_regions_cover_what_is_below_them(change: Callable[[nn.Module], nn.Module], form: str) -> None:
    model = on_layers(change)
    found = training(model).checkpointing
    assert [(each.name, each.form, each.reentrant) for each in found] == [
        ("layers.0", form, False),
        ("layers.1", form, False),
    ]
    facts = network(model)
    assert [each.checkpointed for each in facts.linears] == [None, *["layers.0"] * 2, *["layers.1"] * 2]
    assert facts.blocks[0].checkpointed == 2
