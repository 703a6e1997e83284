"""Which marks compile something, held to the frames that this torch's Dynamo compiles."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

from fp8doctor.facts import CompileMark
from tests.examine.models import Block, Stacked, network, training

SKIPS = not hasattr(eval_frame.OptimizedModule, "_should_wrap_module_call_impl")
"""Whether this torch compiles nothing for ``.compile()`` in place on classes of torch.nn: before 2.15, which
has that method."""


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Blocks(nn.Sequential):
    """A class of the user's, with the forward of torch."""


class Own(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def frames(model: nn.Module) -> int:
    counters.clear()
    model(torch.zeros(2, 4, 32))
    return int(counters["frames"].get("ok", 0))


def linears() -> list[nn.Module]:
    return [nn.Linear(32, 32), nn.Linear(32, 32)]


def blocks() -> list[nn.Module]:
    return [Block(), nn.Sequential(Block()), nn.Linear(32, 32)]


@pytest.mark.parametrize(
    ("build", "mark", "regions"),
    [
        (lambda: nn.Sequential(*linears()), False, {None}),
        (lambda: nn.TransformerEncoderLayer(32, 4, batch_first=True), False, {None}),
        (lambda: Blocks(*linears()), False, {None}),
        (lambda: nn.Sequential(*blocks()), False, {"0", "1.0", None}),
        (lambda: Own(*linears()), True, {""}),
        (lambda: Block(), True, {""}),
    ],
)
def test_in_place(build: Callable[[], nn.Module], mark: bool, regions: set[str | None]) -> None:
    model = build()
    model.compile(backend="eager")
    assert training(model).compile_marks == (
        CompileMark(name="", form="in_place", backend="eager", compiles=mark or not SKIPS),
    )
    found = {linear.compiled for linear in network(model).linears}
    assert found == (regions if mark or SKIPS else {""})
    assert frames(model) == len(found - {None})


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [lambda: nn.Sequential(*linears()), lambda: nn.TransformerEncoderLayer(32, 4, batch_first=True)]
)
def test_wrapped_and_assigned(build: Callable[[], Any]) -> None:
    assigned = build()
    assigned.forward = torch.compile(assigned.forward, backend="eager")
    for model in (torch.compile(build(), backend="eager"), assigned):
        assert [mark.compiles for mark in training(model).compile_marks] == [True]
        assert {linear.compiled for linear in network(model).linears} == {""}
        assert frames(model) == 1


def test_a_mark_inside_a_region_is_traced_with_it() -> None:
    model = Own(nn.Sequential(*linears()))
    model[0].compile(backend="eager")
    model.compile(backend="eager")
    assert [mark.compiles for mark in training(model).compile_marks] == [True, True]
    assert frames(model) == 1


def test_a_disabled_module_is_no_region() -> None:
    model = nn.Sequential(torch.compiler.disable(Block()), Block())
    assert training(model).compile_marks == ()
    assert {linear.compiled for linear in network(torch.compile(model)).linears} == {None, ""}
    model.compile()
    assert {linear.compiled for linear in network(model).linears} == ({None, "1"} if SKIPS else {None, ""})


def test_a_list_that_nobody_calls() -> None:
    model = Stacked()
    model.blocks.compile(backend="eager")
    assert [mark.compiles for mark in training(model).compile_marks] == [False]
    assert network(model).blocks[0].compiled == 0
    counters.clear()
    model(torch.arange(8).reshape(2, 4))
    assert not counters["frames"]


class Decorated(Block):
    """A class whose forward is compiled where it is defined."""

    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def own_backend(graph: Any, inputs: Any) -> Any:
    return graph


def test_five_ways_to_compile() -> None:
    model = Stacked()
    model.blocks[0].compile(backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1])
    model.blocks[2].forward = torch.compile(model.blocks[2].forward, backend="aot_eager")
    model.norm = Decorated()
    step = torch.compile(lambda model, batch: None, backend=own_backend)
    assert {each.compiled for each in network(Stacked(), training_step=step).linears} == {""}
    assert training(model, training_step=step).compile_marks == (
        CompileMark(name="", form="training_step", backend="own_backend", compiles=True),
        CompileMark(name="blocks.0", form="in_place", backend="eager", compiles=True),
        CompileMark(name="blocks.1", form="wrapped", backend="inductor", compiles=True),
        CompileMark(name="blocks.2", form="assigned_forward", backend="aot_eager", compiles=True),
        CompileMark(name="norm", form="decorated_forward", backend="aot_eager", compiles=True),
    )


def test_a_disabled_forward_is_no_mark() -> None:
    model = Stacked()
    model.forward = torch.compiler.disable(model.forward)
    assert training(model).compile_marks == ()
    step = torch.compiler.disable(lambda model, batch: None)
    assert training(Stacked(), training_step=step).compile_marks == ()
