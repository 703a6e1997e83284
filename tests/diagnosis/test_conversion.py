"""How to convert a model without FP8, in the lines that make what was timed fastest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.prescription import as_timed
from fp8doctor.examine import examine
from fp8doctor.facts import Arm, Distributed, Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.treatments.apply import carry_out
from tests.checks.arms import ran, timed
from tests.examine.models import Stacked, network

BLOCKS = ran("float8_tensorwise", 90.0, treatments=("convert-tensorwise", "compile-blocks"))
DDP = Distributed(world_size=2, wrapper="DDP")
OWN = ran("float8_rowwise_as_compiled", 80.0, treatments=("convert-rowwise",))


def of(model: nn.Module, *arms: Arm, device: str = "cuda") -> Facts:
    batch = torch.arange(64).reshape(4, 16)
    job = Job(model=model, target=Target(), workload=Workload(accumulate=1), batch=batch)
    return timed(examine(job), ran("as_is", 100.0), *arms, device=device)


def conversion_of(facts: Facts) -> list[Step]:
    return [*as_timed((), trial_view(facts))]


def recipes(model: nn.Module) -> dict[str, str | None]:
    return {each.name: each.recipe for each in network(model).linears if each.use == "training"}


@pytest.mark.parametrize(
    ("compiled", "arm", "recipe", "marks"),
    [
        (lambda model: model, BLOCKS, "tensorwise", 3),
        (torch.compile, OWN, "rowwise", 0),
    ],
    ids=["block by block", "his own"],
)
def test_the_lines_make_what_was_timed(
    compiled: Callable[[nn.Module], nn.Module], arm: Arm, recipe: str, marks: int
) -> None:
    """Run, and carried out on the live model: every Linear but the head, and compiled as the arm was."""
    steps = conversion_of(of(compiled(Stacked().bfloat16()), arm))
    assert [step.treatment.name for step in steps] == list(arm.treatments)
    by_lines = Stacked().bfloat16()
    for step in steps:
        exec(step.treatment.code, {"model": by_lines})
    expected = {f"blocks.{i}.{name}": recipe for i in range(3) for name in ("up", "down")}
    assert recipes(by_lines) == expected
    assert sum(block._compiled_call_impl is not None for block in by_lines.blocks) == marks
    live = compiled(Stacked().bfloat16())
    changed = carry_out([step.treatment for step in steps], live, of(live))
    assert recipes(changed) == expected


def test_what_is_saved_is_told_by_its_cause() -> None:
    first, second = conversion_of(of(Stacked().bfloat16(), ran("bf16_compiled", 97.0), BLOCKS))
    assert first.saving_ms is not None
    assert second.saving_ms is not None
    assert (first.saving_ms.middle, first.saving_ms.basis) == (7.0, "measured")
    assert second.saving_ms.middle == 3.0
    assert "your own" not in first.treatment.code + second.treatment.code


def test_lines_in_place_of_the_users_own_compile_say_so() -> None:
    model = torch.compile(Stacked().bfloat16())
    second = conversion_of(of(model, BLOCKS, ran("float8_tensorwise_as_compiled", 95.0)))[1]
    assert second.treatment.code.startswith("# leave out your own torch.compile\nfor block in ")
    own = conversion_of(of(model, BLOCKS, OWN))
    assert [step.treatment.name for step in own] == ["convert-rowwise"]
    assert own[0].treatment.code.splitlines()[-3] == "# before your own torch.compile, which stays as it is"


def test_blocks_that_are_compiled_stay_so() -> None:
    """The model is converted before them, and before it is wrapped: its names are those without a prefix."""
    model = Stacked().bfloat16()
    for block in model.blocks:
        block.compile()
    facts = replace(of(model, BLOCKS), training=replace(of(model).training, distributed=DDP))
    (step,) = conversion_of(facts)
    assert step.saving_ms is not None
    assert step.saving_ms.middle == 10.0
    *_, _before, keep, convert = step.treatment.code.splitlines()
    assert keep == 'keep = {"head"}'
    assert convert.startswith("convert_to_float8_training(model, ")


def test_fp32_weights_are_told_their_autocast() -> None:
    arm = ran("float8_tensorwise", 60.0, treatments=("autocast-bf16", "convert-tensorwise", "compile-blocks"))
    names = [step.treatment.name for step in conversion_of(of(Stacked(), arm))]
    assert names == ["convert-tensorwise", "autocast-bf16", "compile-blocks"]


@pytest.mark.parametrize(
    ("arms", "device"),
    [
        ((), "cuda"),
        ((BLOCKS,), "cpu"),
        ((ran("float8_tensorwise", 98.5, treatments=BLOCKS.treatments),), "cuda"),
        ((BLOCKS, ran("bf16_compiled", 85.0)), "cuda"),
    ],
    ids=["not timed", "on a CPU", "even", "BF16 is faster"],
)
def test_nothing_is_converted_that_does_not_pay(arms: tuple[Arm, ...], device: str) -> None:
    steps = conversion_of(of(Stacked().bfloat16(), *arms, device=device))
    assert not [step for step in steps if step.treatment.name.startswith("convert")]


def test_bf16_that_is_faster_compiled_is_compiled() -> None:
    """As most who train in BF16 could, and FP8 gains nothing on top of it."""
    (step,) = conversion_of(of(Stacked().bfloat16(), BLOCKS, ran("bf16_compiled", 85.0)))
    assert step.treatment.code == "for block in model.blocks:\n    block.compile()"
    assert step.saving_ms is not None
    assert step.saving_ms.middle == 15.0


def test_the_report_holds_it() -> None:
    report = diagnose(of(Stacked().bfloat16(), BLOCKS))
    assert [step.treatment.name for step in report.prescription] == ["convert-tensorwise", "compile-blocks"]


def test_a_plan_that_was_timed_gets_no_autocast_that_was_not() -> None:
    """The trial times autocast by itself. Checks that propose it are left out here."""
    facts = of(Stacked(), ran("bf16_compiled", 97.0))
    report = diagnose(facts, ignore=("MEM003", "CMP007"))
    assert report.verdict.basis == "measured"
    assert "autocast-bf16" not in {step.treatment.name for step in report.prescription}
