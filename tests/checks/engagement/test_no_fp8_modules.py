"""MOD001 on models that went through the real Accelerate, and on what must not be mistaken for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.engagement.no_fp8_modules import FIRES
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Environment, Facts, TrainerArguments
from fp8doctor.finding import Finding, Treatment
from fp8doctor.stacks.torchao_private import CONVERTER_TRACE
from tests.checks.environment.live import outcome_of
from tests.checks.rules import found_by
from tests.examine.models import gpt2, llama

Look = Callable[..., Facts]


def found(facts: Facts) -> tuple[Finding, Treatment]:
    finding = found_by("no-fp8-modules", facts)
    assert finding.treatment is not None
    return finding, finding.treatment


def linears(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(each, each) for each in sizes))


@pytest.fixture
def prepare(forget_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What `accelerate launch --mixed_precision fp8` and a script of three lines do."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")

    def prepared(model: nn.Module) -> Any:
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

    return prepared


@pytest.mark.parametrize(
    ("build", "fix"),
    [
        (gpt2, "conv1d-to-linear"),
        (lambda: linears(100, 100, 100, 100), "pad-dimensions"),
        (lambda: linears(64, 64), "convert"),
    ],
    ids=["Conv1D", "widths", "two Linears"],
)
def test_what_prepare_does_not_convert(
    prepare: Callable[..., Any], look: Look, build: Callable[[], nn.Module], fix: str
) -> None:
    finding, treatment = found(look(prepare(build())))
    assert finding.severity == "error"
    assert treatment.name == fix
    assert finding.evidence["asked_by"] == "ACCELERATE_MIXED_PRECISION=fp8"


def test_the_printed_lines_for_conv1d_and_a_model_that_was_converted(
    prepare: Callable[..., Any], look: Look
) -> None:
    model = gpt2()
    _, treatment = found(look(prepare(gpt2())))
    for parent in list(model.modules()):
        for name, conv1d in list(parent.named_children()):
            if type(conv1d).__name__ == "Conv1D":
                names = {"nn": nn, "conv1d": conv1d}
                exec(treatment.code, names)
                setattr(parent, name, names["linear"])
    assert outcome_of("MOD001", look(prepare(model))).outcome == "silent"


def test_before_prepare_it_is_information(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/fixes` runs the lines; a Trainer converts by itself, so nothing is to be prepared."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    facts = look(llama())
    finding, treatment = found(facts)
    assert (finding.severity, diagnose(facts).verdict.status) == ("info", "no_fp8")
    assert "AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))" in treatment.code
    trainer = TrainerArguments(kind="x.TrainingArguments", bf16=False, fp16=False, mixed_precision="fp8")
    _, treatment = found(replace(facts, training=replace(facts.training, trainer=trainer)))
    assert treatment.kind == "sketch"
    assert "prepare" not in treatment.code


def test_a_training_step_is_proof_enough(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = linears(64, 64, 64)
    model(torch.ones(16, 64)).sum().backward()
    finding, treatment = found(look(model))
    assert finding.severity == "error"
    assert finding.evidence["conversion_due"] == "a training step has run"
    assert treatment.name == "convert"


def test_what_asks_for_nothing_and_what_is_no_fp8(look: Look) -> None:
    assert outcome_of("MOD001", look(llama())).reason == "nothing asks for FP8"
    old = replace(FIRES, environment=Environment(), training=replace(FIRES.training, accelerate=None))
    assert outcome_of("MOD001", old).outcome == "not_applicable", "a recording without variables"
    layer = replace(FIRES.network.linears[0], stack="bitsandbytes", use="storage", dtype="int8")
    assert found(replace(FIRES, network=replace(FIRES.network, linears=(layer,))))


@pytest.fixture
def uncalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where torchao's converter was not called yet."""
    import torchao.float8._inductor_patch

    monkeypatch.setattr(torchao.float8._inductor_patch, "_PATCHED", True)
    monkeypatch.delitem(sys.modules, CONVERTER_TRACE)


def script(folder: Path, text: str) -> ModuleType:
    """What a file of this text became."""
    module = ModuleType("train")
    module.__file__ = str(folder / "train.py")
    (folder / "train.py").write_text(text)
    return module


@pytest.mark.parametrize(
    ("build", "fix"),
    [(lambda: linears(64, 64), "convert"), (gpt2, "conv1d-to-linear")],
    ids=["a filter", "Conv1D"],
)
def test_a_converter_that_replaced_nothing_is_an_error(
    uncalled: None, look: Look, build: Callable[[], nn.Module], fix: str
) -> None:
    with ConversionWatch() as watch:
        model = convert_to_float8_training(build(), module_filter_fn=lambda module, name: "blocks." in name)
    facts = look(model, watched=watch)
    finding, treatment = found(facts)
    assert finding.severity == "error"
    assert finding.evidence["asked_by"] == "convert_to_float8_training"
    assert treatment.name == fix
    assert diagnose(facts).verdict.status == "fp8_not_engaged"


def test_a_converter_that_replaced_linears_is_not_blamed(uncalled: None, look: Look) -> None:
    with ConversionWatch() as watch:
        converted, other = convert_to_float8_training(linears(64, 64)), linears(64, 64)
    assert outcome_of("MOD001", look(converted, watched=watch)).outcome == "not_applicable"
    assert diagnose(look(other, watched=watch)).verdict.status == "no_fp8"


def test_a_call_in_the_code_that_has_not_run(uncalled: None, look: Look, tmp_path: Path) -> None:
    with ConversionWatch() as watch:
        model = linears(64, 64)
    watch.code = script(tmp_path, "if use_fp8:\n    convert_to_float8_training(model)\n")
    said = outcome_of("MOD001", look(model, watched=watch)).reason
    assert said == "the code's call of convert_to_float8_training has not run"


def test_a_call_that_nobody_could_see_is_information(look: Look, tmp_path: Path) -> None:
    """As after an earlier call in the same process, or with a torchao that leaves no trace of one."""
    convert_to_float8_training(linears(64, 64))
    with ConversionWatch() as watch:
        model = linears(64, 64)
    watch.code = script(tmp_path, "convert_to_float8_training(model, module_filter_fn=mine)\n")
    assert found(look(model, watched=watch))[0].severity == "info"
    watch.code = script(tmp_path, "from torchao.float8 import convert_to_float8_training  # (model)\n")
    assert outcome_of("MOD001", look(model, watched=watch)).outcome == "not_applicable", (
        "an import is no call"
    )
