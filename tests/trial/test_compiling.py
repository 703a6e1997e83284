"""Blocks, layers and whole models are compiled, and compile marks are taken off and along."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.treatments.apply import swap
from fp8doctor.trial.treatments.compilation import block_by_block, compile_blocks, strip_compile_marks
from tests.examine.models import Stacked, network, training
from tests.stand_ins import transformer_engine as te
from tests.trial.treated import applied, facts

pytestmark = pytest.mark.slow


def test_what_is_compiled() -> None:
    model = convert_to_float8_training(Stacked())
    for name, regions in (
        ("compile-blocks", {"blocks.0", "blocks.1", "blocks.2", "head"}),
        ("compile-model", {""}),
    ):
        changed = network(applied(name, model).model)
        assert [blocks.compiled for blocks in changed.blocks] == [3]
        assert {linear.compiled for linear in changed.linears} == regions
    assert {linear.compiled for linear in network(model).linears} == {None}


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


def test_a_swap_takes_the_compile_mark_along_and_reaches_every_place() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(
        torch.compile(nn.Linear(4, 4), backend="eager"), shared, nn.Sequential(shared), nn.Linear(4, 4)
    )
    model[3].forward = torch.compile(model[3].forward, backend="eager")
    names: list[str] = []

    def identity(name: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, nn.Linear):
            return None
        names.append(name)
        return nn.Identity()

    swapped = swap(model, identity)
    assert names == ["0", "1", "3"]
    assert type(swapped[0]).__name__ == "OptimizedModule"  # type: ignore[index]
    assert swapped[1] is swapped[2][0]  # type: ignore[index]
    torch._dynamo.utils.counters.clear()
    assert torch.equal(swapped(torch.ones(2, 4)), torch.ones(2, 4))
    assert hasattr(swapped[3].forward, "_torchdynamo_orig_callable")  # type: ignore[index]


def test_accelerates_wrappers_stay_around_blocks_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    """BF16 autocast as `Accelerator.prepare` puts it around the forward, and around that the FP8 autocast of
    Transformer Engine."""
    library = te.install(monkeypatch, "fp8")
    monkeypatch.setattr(library, "fp8_autocast", lambda enabled, fp8_recipe: te.autocast(enabled, fp8_recipe))
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    recipe = te.DelayedScaling()
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(
        Stacked(lambda: nn.Sequential(te.Linear(32, 32), nn.ReLU()))
    )  # type: ignore[arg-type]
    model.forward = MethodType(contextual_fp8_autocast(model.forward, recipe), model)
    replica = replicate(model, share=True)[0]
    give_own_code(replica)
    compiled = block_by_block(replica, facts(model), backend="eager")
    output = compiled(torch.arange(16).reshape(2, 8))
    layers = [module for module in compiled.modules() if isinstance(module, te.Linear)]
    assert [(layer.fp8, layer.fp8_meta["recipe"]) for layer in layers] == [(True, recipe)] * 3
    assert training(compiled).forward_chain == training(model).forward_chain
    assert output.dtype == torch.float32, "converted back by Accelerate"
    assert not any(module.fp8 for module in model.modules() if isinstance(module, te.Linear))
    assert compiled.forward.__self__ is compiled
