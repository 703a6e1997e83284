"""Activation checkpointing is switched off in every form that can be, and the cache stays off beside it."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8doctor.diagnosis.treatments import describe
from tests.examine.models import Stacked, llama, network, training
from tests.trial.treated import TOKENS, applied, facts, float8, in_fp8

pytestmark = pytest.mark.slow


def forwards_per_step(model: nn.Module, layer: str) -> int:
    """How often a layer runs in forward and backward together."""
    calls: list[int] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda module, arguments: calls.append(1))
    model(**TOKENS).loss.backward()
    return len(calls)


def test_transformers_checkpointing_is_switched_off_and_the_cache_stays_off_beside_it() -> None:
    model = llama(use_cache=True)
    model.gradient_checkpointing_enable()
    assert (training(model.train()).use_cache, training(model).cache_switch) == (False, "")
    off = applied("checkpointing-off", model).model
    assert [forwards_per_step(each, "model.layers.0.mlp.up_proj") for each in (model, off)] == [2, 1]
    assert (training(off).use_cache, off(**TOKENS).past_key_values) == (False, None)
    treatment = describe("checkpointing-off", facts(model))
    assert treatment is not None
    exec(treatment.code, {"model": model})
    assert (training(model).use_cache, training(model).checkpointing) == (False, ())


@pytest.mark.parametrize(
    "order", ["compiled inside", "compiled around", "in place inside", "in place around"]
)
def test_a_checkpoint_wrapper_goes_and_the_compile_mark_beside_it_stays(order: str) -> None:
    model = float8(Stacked())
    for number, block in enumerate(model.blocks):
        inside, in_place = order.endswith("inside"), order.startswith("in place")
        made = block if inside else checkpoint_wrapper(block)
        if in_place:
            made.compile(backend="eager")
        else:
            made = torch.compile(made, backend="eager")
        model.blocks[number] = checkpoint_wrapper(made) if inside else made
    before = training(model)
    assert [each.name for each in before.checkpointing] == ["blocks.0", "blocks.1", "blocks.2"]
    off = applied("checkpointing-off", model).model
    after = training(off)
    assert {linear.checkpointed for linear in network(off).linears} == {None}
    assert len(in_fp8(off)) == len(in_fp8(model)) == 6
    assert after.checkpointing == ()
    assert [each.name for each in after.compile_marks] == [each.name for each in before.compile_marks]
    assert len(after.compile_marks) == 3
