"""The BF16 that FP8 is compared with: in every form that the user could write, his own compile marks among
them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.examine import examine
from fp8doctor.facts import Target, Workload
from fp8doctor.facts.arm_names import ArmName, is_conversion
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.copies.step import Variant, VariantPlan
from fp8doctor.trial.planning import plan_variants
from tests.checks.trials import tried
from tests.examine.models import Stacked
from tests.trial.treated import float8

TOKENS = torch.arange(64).reshape(4, 16)


def assigned(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    return model


def by_block(model: Stacked, **settings: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(**settings)
    return model


COMPILED_FIRST = [ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED, ArmName.BF16]
"""The forms of BF16 of a step that its user compiles otherwise: FP8 is compared with the first."""


def job(model: nn.Module) -> Job:
    return Job(model.train(), Target(), Workload(accumulate=1), TOKENS)


def plans(of: Job) -> dict[str, VariantPlan]:
    return {plan.name: plan for plan in plan_variants(examine(of), [], of)}


@pytest.mark.parametrize(
    "compiled", [torch.compile, assigned, lambda model: by_block(model, mode="max-autotune")]
)
def test_bf16_is_timed_as_the_user_compiles_it_too(compiled: Callable[[Any], nn.Module]) -> None:
    of = job(compiled(float8(Stacked().bfloat16())))
    found = plans(of)
    assert [name for name in found if name in COMPILED_FIRST] == COMPILED_FIRST
    replica = replicate(of.model, share=True)[0]
    give_own_code(replica)
    made = found[ArmName.BF16_AS_COMPILED].make(Variant(replica, TOKENS)).model
    marks = [mark.form for mark in examine(job(made)).training.compile_marks]
    assert marks == [mark.form for mark in examine(of).training.compile_marks]
    assert not any("Float8" in type(module).__name__ for module in made.modules())


def test_a_model_without_fp8_is_converted_in_both_forms() -> None:
    found = plans(job(torch.compile(Stacked().bfloat16())))
    conversions = {name: plan.treatments for name, plan in found.items() if is_conversion(name)}
    assert conversions == {
        "float8_tensorwise": ("convert-tensorwise", "compile-blocks"),
        "float8_tensorwise_as_compiled": ("convert-tensorwise",),
        "float8_rowwise_with_gw_hp": ("convert-rowwise_with_gw_hp", "compile-blocks"),
        "float8_rowwise_with_gw_hp_as_compiled": ("convert-rowwise_with_gw_hp",),
    }
    assert [name for name in found if name in COMPILED_FIRST] == COMPILED_FIRST[1:]
    assert [name for name in plans(job(by_block(Stacked().bfloat16()))) if is_conversion(name)] == [
        "float8_tensorwise",
        "float8_rowwise_with_gw_hp",
    ]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().mean()


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["the model", "its step"])
def test_every_form_of_bf16_runs_compiled_as_it_says(compiles: str) -> None:
    model, of = float8(Stacked().bfloat16()), {}
    if compiles == "the model":
        model = torch.compile(model, backend="eager")
    else:
        of["training_step"] = torch.compile(step, backend="eager")
    arms = tried(model, TOKENS, "as_is", *COMPILED_FIRST, **of).trial.arms
    assert {arm.name: (arm.reason, arm.fp8_gemms == 0) for arm in arms} == {
        "as_is": (None, False),
        **dict.fromkeys(COMPILED_FIRST, (None, True)),
    }
    graphs = {arm.name: arm.graphs_run for arm in arms}
    assert (graphs["bf16"], graphs["bf16_compiled"]) == (0, 3)
    assert graphs["bf16_as_compiled"] == graphs["as_is"] == 1
