"""Blocks, layers and whole models are compiled, and compile marks are taken off and along."""

import pytest
import torch
from torch import nn

from fp8doctor.examine.marks import is_disabled
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.treatments.forms import compile_blocks, strip_compile_marks
from tests.examine.models import network, training
from tests.trial.treated import applied

pytestmark = pytest.mark.slow


class Nested(nn.Module):
    """Blocks of a class of torch.nn, each of another length."""

    def __init__(self, deeper: int = 0) -> None:
        super().__init__()
        layers = (nn.Sequential(*(nn.Linear(32, 32) for _ in range(1 + deeper))) for _ in range(2))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def frames(model: nn.Module, x: torch.Tensor) -> int:
    torch._dynamo.utils.counters.clear()
    model(x)
    return int(torch._dynamo.utils.counters["frames"].get("ok", 0))


def test_classes_of_torch_are_wrapped_and_compile() -> None:
    model = Nested()
    changed = applied("compile-blocks", model).model
    marks = training(changed).compile_marks
    assert {(mark.form, mark.compiles) for mark in marks} == {("wrapped", True)}
    assert [linear.compiled for linear in network(changed).linears] == [mark.name for mark in marks]
    assert frames(changed, torch.ones(4, 32, requires_grad=True)) == 1
    again = replicate(changed, share=True)[0]
    assert training(again).compile_marks == marks
    assert {linear.compiled for linear in network(strip_compile_marks(again)).linears} == {None}
    assert training(model).compile_marks == ()


def test_what_keeps_dynamo_out_stays_when_compile_marks_go() -> None:
    class Kept(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = nn.Sequential(Kept(4, 4), nn.Linear(4, 4))
    model[1].forward = torch.compiler.disable(model[1].forward)
    assert all(map(is_disabled, strip_compile_marks(model)))


def test_wrapped_classes_of_torch_do_not_push_each_other_out() -> None:
    """What Dynamo compiles for all of them is one function of its own, of which it keeps eight versions."""
    torch._dynamo.reset()
    x = torch.ones(4, 32, requires_grad=True)
    models = [Nested(deeper) for deeper in range(10)]
    assert [frames(compile_blocks(model, ["blocks"], backend="eager"), x) for model in models] == [1] * 10
    for deeper in range(10):
        compiled = torch.compile(nn.Sequential(*Nested(deeper).blocks[0]), backend="eager")
        replica = replicate(compiled, share=True)[0]
        give_own_code(replica)
        assert frames(replica, x) == 1
