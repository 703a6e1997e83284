"""MOD001 on models that went through the real Accelerate, and on what must not be mistaken for it."""

import sys
from collections.abc import Callable
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
from fp8doctor.stacks.torchao import CONVERTER_TRACE
from tests.checks.rules import Look, answer_of, fix_of, found_by, outcome_of
from tests.examine.models import gpt2, llama

RULE = "no-fp8-modules"


def found(facts: Facts) -> tuple[Finding, Treatment]:
    finding = found_by(RULE, facts)
    assert finding.treatment is not None
    return finding, finding.treatment


def linears(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(each, each) for each in sizes))


@pytest.fixture
def asked(forget_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")


def prepared(model: nn.Module) -> Any:
    """What `accelerate launch --mixed_precision fp8` and a script of three lines do."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


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
    asked: None, look: Look, build: Callable[[], nn.Module], fix: str
) -> None:
    finding, treatment = found(look(prepared(build())))
    assert (finding.severity, treatment.name) == ("error", fix)
    assert finding.evidence["asked_by"] == "ACCELERATE_MIXED_PRECISION=fp8"


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({"quant_method": "fp8"}, "fires"),
        ({"quant_method": "fp8", "dequantize": True}, "not_applicable"),
        ({"quant_method": "bitsandbytes"}, "not_applicable"),
    ],
)
def test_a_configuration_asks_for_fp8_that_from_config_does_not_make(
    look: Look, settings: dict[str, object], outcome: str
) -> None:
    model = llama()
    model.config.quantization_config = settings
    facts = look(model)
    assert outcome_of(RULE, facts) == outcome
    if outcome == "fires":
        finding, treatment = found(facts)
        assert (finding.severity, treatment.name) == ("error", "convert")
        assert finding.evidence["asked_by"] == "quantization_config"


def test_the_printed_lines_for_conv1d(asked: None, look: Look) -> None:
    model = gpt2().eval()
    _, treatment = found(look(prepared(gpt2())))
    ids = torch.arange(8)[None]
    before = model(ids).logits
    exec(treatment.code, {"nn": nn, "model": model})
    assert torch.allclose(model(ids).logits, before, atol=1e-5)
    assert outcome_of(RULE, look(prepared(model))) == "silent"


def test_before_prepare_it_is_information(asked: None, look: Look) -> None:
    """A Trainer converts by itself, so nothing is to be prepared; after a training step it is too late."""
    model = linears(64, 64, 64)
    facts = look(model)
    finding, treatment = found(facts)
    assert (finding.severity, diagnose(facts).verdict.status) == ("info", "no_fp8")
    assert "AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))" in treatment.code
    trainer = TrainerArguments(kind="x.TrainingArguments", bf16=False, fp16=False, mixed_precision="fp8")
    assert (
        "prepare" not in fix_of(RULE, replace(facts, training=replace(facts.training, trainer=trainer))).code
    )
    model(torch.ones(16, 64)).sum().backward()
    finding, treatment = found(look(model))
    assert (finding.severity, treatment.name) == ("error", "convert")
    of_trainer = replace(FIRES, training=replace(FIRES.training, trainer=trainer))
    codes = [fix_of(RULE, facts).code for facts in (FIRES, of_trainer)]
    assert ["accelerator.prepare(" in code for code in codes] == [True, False]


def test_nothing_asks_for_fp8(look: Look) -> None:
    assert answer_of(RULE, look(llama())).reason == "nothing asks for FP8 in this model"
    old = replace(FIRES, environment=Environment(), training=replace(FIRES.training, accelerate=None))
    assert outcome_of(RULE, old) == "not_applicable", "a recording without variables"


@pytest.fixture
def uncalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where torchao's converter was not called yet."""
    import torchao.float8._inductor_patch

    monkeypatch.setattr(torchao.float8._inductor_patch, "_PATCHED", True)
    monkeypatch.delitem(sys.modules, CONVERTER_TRACE)


def test_a_converter_that_replaced_nothing_is_an_error(uncalled: None, look: Look) -> None:
    with ConversionWatch() as watch:
        model = convert_to_float8_training(linears(64, 64), module_filter_fn=lambda module, name: "b" in name)
    facts = look(model, watched=watch)
    finding, treatment = found(facts)
    assert (finding.severity, treatment.name) == ("error", "convert")
    assert finding.evidence["asked_by"] == "convert_to_float8_training"
    assert diagnose(facts).verdict.status == "fp8_not_engaged"


def test_a_converter_that_replaced_linears_is_not_blamed(uncalled: None, look: Look) -> None:
    with ConversionWatch() as watch:
        converted, other = convert_to_float8_training(linears(64, 64)), linears(64, 64)
    assert outcome_of(RULE, look(converted, watched=watch)) == "silent"
    assert diagnose(look(other, watched=watch)).verdict.status == "no_fp8"


def test_a_call_that_nobody_could_see(uncalled: None, look: Look) -> None:
    """A call is not seen after an earlier one in the same process."""
    convert_to_float8_training(linears(64, 64))
    with ConversionWatch() as watch:
        model = linears(64, 64)
    assert outcome_of(RULE, look(model, watched=watch)) == "not_applicable"
