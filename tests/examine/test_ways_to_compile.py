"""Which compile marks a job bears, whoever set them."""

from __future__ import annotations

from typing import Any

import torch

from fp8doctor.facts import CompileMark
from tests.examine.models import Block, Stacked, training


class Decorated(Block):
    """A class whose forward is compiled where it is defined."""

    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_five_ways_to_compile() -> None:
    model = Stacked()
    model.blocks[0].compile(backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1])
    model.blocks[2].forward = torch.compile(model.blocks[2].forward, backend="aot_eager")
    model.norm = Decorated()
    step = torch.compile(lambda model, batch: None, backend="eager")
    assert training(model, training_step=step).compile_marks == (
        CompileMark(name="", form="training_step", backend="eager", compiles=True),
        CompileMark(name="blocks.0", form="in_place", backend="eager", compiles=True),
        CompileMark(name="blocks.1", form="wrapped", backend="inductor", compiles=True),
        CompileMark(name="blocks.2", form="assigned_forward", backend="aot_eager", compiles=True),
        CompileMark(name="norm", form="decorated_forward", backend="aot_eager", compiles=True),
    )


def test_a_backend_of_the_users_own() -> None:
    def nothing(graph: Any, inputs: Any) -> Any:
        return graph

    assert training(torch.compile(Stacked(), backend=nothing)).compile_marks == (
        CompileMark(name="", form="wrapped", backend="nothing", compiles=True),
    )


def test_a_disabled_forward_is_no_mark() -> None:
    model = Stacked()
    model.forward = torch.compiler.disable(model.forward)
    assert training(model).compile_marks == ()
    assert (
        training(Stacked(), training_step=torch.compiler.disable(lambda model, batch: None)).compile_marks
        == ()
    )
