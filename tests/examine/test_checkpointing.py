"""Forms of activation checkpointing, found on real objects."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fp8doctor.facts import recorded
from tests.examine.models import Stacked, by_name, called, llama, training

TOKENS = torch.arange(32).reshape(2, 16)


def marks(model: nn.Module) -> list[tuple[Any, ...]]:
    found = training(model).checkpointing
    return [(each.name, each.form, each.active, each.reentrant) for each in found]


def test_checkpoint_wrappers() -> None:
    model = Stacked()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = checkpoint_wrapper(model.blocks[1], checkpoint_impl=CheckpointImpl.REENTRANT)
    model.blocks[2] = offload_wrapper(model.blocks[2])
    assert marks(model) == [("blocks.0", "wrapper", True, False), ("blocks.1", "wrapper", True, True)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_huggingface_checkpointing(reentrant: bool) -> None:
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert marks(model) == [(f"model.layers.{i}", "huggingface", True, reentrant) for i in (0, 1)]
    assert not any(active for _, _, active, _ in marks(model.eval()))
    model.activation_checkpointing_disable()
    assert marks(model) == []


def test_flag_on_the_model_covers_its_blocks() -> None:
    """Models of transformers before 4.53, and remote code today, decide above the list of blocks."""
    model = Stacked()
    model.gradient_checkpointing = True
    linears = by_name(model)
    assert [linears[name].checkpointed for name in ("blocks.0.up", "blocks.2.down", "head")] == [
        "blocks.0",
        "blocks.2",
        None,
    ]


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


class LikeTimm(Stack):
    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:  # through a function of its own, as timm's checkpoint_seq
            run = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
            x = run(lambda x, layer=layer: layer(x), x) if self.grad_checkpointing else layer(x)
        return x


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
}
OFF = {"none": Stack, "timm": LikeTimm}


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
@pytest.mark.parametrize("build", [*ON.values(), *OFF.values()], ids=[*ON, *(f"{each}, off" for each in OFF)])
def test_what_a_forward_calls(build: Callable[[], nn.Module]) -> None:
    model = build()
    active = [each.active for each in called(model, BATCH).training.checkpointing][:1]
    assert active == ([True] if recomputes(model) else [])
    assert bool(active) is (build in ON.values())


@pytest.mark.slow
def test_a_call_may_depend_on_the_batch() -> None:
    for rows, active in ((1, []), (2, [True, True])):
        found = called(Stack(Sometimes), torch.ones(rows, 16)).training.checkpointing
        assert [each.active for each in found] == active


@pytest.mark.parametrize("batch", [None, torch.ones(2, 3)], ids=["no batch", "a batch that does not fit"])
def test_without_a_forward_it_is_unknown(batch: torch.Tensor | None) -> None:
    facts = called(flagged(LikeTimm()), batch)
    assert [each.active for each in facts.training.checkpointing] == [None]
    assert not recorded(facts.linears()[1], "checkpointed")
    assert facts.gaps["network.linears.checkpointed"]
