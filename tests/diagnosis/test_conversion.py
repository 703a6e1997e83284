"""How to convert a model without FP8, in the lines that make what was timed fastest."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from transformers import Trainer, TrainingArguments

from fp8doctor.analysis.conversion import convert_all_that_fit, keep_in_bf16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.code_snippets import with_imports
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.diagnosis.plan import make_plan
from fp8doctor.examine import examine
from fp8doctor.facts import Arm, Distributed, Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.treatments.apply import carry_out
from tests.checks.arms import ran, timed
from tests.examine.models import Stacked, llama, network, training

BLOCKS = ran("float8_tensorwise", 90.0, treatments=("convert-tensorwise", "compile-blocks"))
DDP = Distributed(world_size=2, wrapper="DDP")
OWN = ran("float8_rowwise_as_compiled", 80.0, treatments=("convert-rowwise",))


def of(model: nn.Module, *arms: Arm, device: str = "cuda") -> Facts:
    batch = torch.arange(64).reshape(4, 16)
    job = Job(model=model, target=Target(), workload=Workload(accumulate=1), batch=batch)
    return timed(examine(job), ran("as_is", 100.0), *arms, device=device)


def conversion_of(facts: Facts) -> list[Step]:
    return [*make_plan(TrialView(facts), (), Expected(facts, ()))]


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
    changed = carry_out([step.treatment for step in steps], live, of(live)).model
    assert recipes(changed) == expected


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


@pytest.mark.slow
def test_a_trainer_gets_the_filter_of_its_own_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forget_accelerate: None
) -> None:
    """It makes the Accelerator by itself, and that converts when training begins."""
    for name, value in {"MIXED_PRECISION": "fp8", "FP8_BACKEND": "AO", "USE_CPU": "1"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    first, then = (Trainer(model=llama(), args=arguments) for _ in range(2))
    model = first.accelerator.prepare(first.model)
    out = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    now = replace(of(model), training=training(model, trainer=first))
    exec(keep_in_bf16(out, now).code, {"trainer": then})
    in_fp8 = recipes(then.accelerator.prepare(then.model))
    assert recipes(model).keys() - in_fp8.keys() == {*out}


def test_a_model_that_is_one_linear_is_replaced() -> None:
    script = {"model": nn.Linear(64, 64)}
    exec(with_imports(convert_all_that_fit(of(script["model"]))), script)
    assert recipes(script["model"]) == {"": "tensorwise"}
