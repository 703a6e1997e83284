"""What was timed on a replica is carried out on a live model."""

from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.finding import Treatment
from fp8doctor.trial.treatments.apply import carry_out
from tests.examine.models import Stacked, llama, lora, network, training
from tests.trial.treated import applied, facts, float8, in_fp8

pytestmark = pytest.mark.slow


def prescribed(*names: str) -> list[Treatment]:
    return [Treatment(name=name, summary=f"the summary of {name}", code="") for name in names]


def test_a_live_model_is_changed_in_place_and_the_rest_is_named() -> None:
    model = float8(Stacked())
    names = ("compile-blocks", "unset-variable", "fused-optimizer", "cache-off", "recipe-rowwise")
    changed = carry_out(prescribed(*names), model, facts(model))
    assert changed.model is model
    assert set(in_fp8(model).values()) == {"rowwise"}
    assert [blocks.compiled for blocks in network(model).blocks] == [3]
    assert [each.name for each in changed.done] == ["recipe-rowwise", "compile-blocks"]
    assert {each.partition(" ")[0] for each in changed.left} == {
        "unset-variable",
        "fused-optimizer",
        "cache-off",
    }


def checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


def recipes(model: nn.Module) -> list[str | None]:
    return list(in_fp8(model).values())


def marks(model: nn.Module) -> int:
    return len(training(model).compile_marks)


def dtypes_of_adapters(model: nn.Module) -> set[str]:
    return {linear.dtype for linear in network(model).linears if linear.adapter == "adapter"}


@pytest.mark.parametrize(
    ("name", "build", "see", "before", "after"),
    [
        ("convert-rowwise", Stacked, recipes, [], ["rowwise"] * 6),
        ("stay-in-bf16", lambda: float8(Stacked()), recipes, ["tensorwise"] * 6, []),
        ("checkpointing-off", checkpointed, lambda model: len(training(model).checkpointing), 2, 0),
        (
            "attention-sdpa",
            lambda: llama(attn_implementation="eager"),
            lambda model: model.config._attn_implementation,
            "eager",
            "sdpa",
        ),
        ("cache-off", lambda: llama(use_cache=True), lambda model: model.config.use_cache, True, False),
        ("compile-blocks", Stacked, marks, 0, 3),
        ("compile-model", Stacked, marks, 0, 1),
        ("adapters-to-bf16", lambda: lora(llama().bfloat16()), dtypes_of_adapters, {"float32"}, {"bfloat16"}),
    ],
)
def test_what_is_timed_on_a_replica_is_what_a_live_model_gets(
    name: str, build: Any, see: Any, before: Any, after: Any
) -> None:
    model = build()
    assert see(model) == before
    assert see(applied(name, model).model) == after
    assert see(model) == before, "the replica alone was changed"
    changed = carry_out(prescribed(name), model, facts(model))
    assert (changed.model is model, changed.left) == (True, ())
    assert see(model) == after


def test_a_live_model_whose_parameters_are_replaced_needs_its_optimizer_anew() -> None:
    model = lora(llama().bfloat16())
    assert carry_out(prescribed("adapters-to-bf16"), model, facts(model)).replaced
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
