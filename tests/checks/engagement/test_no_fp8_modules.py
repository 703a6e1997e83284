"""MOD001 on models that went through the real Accelerate, and on what must not be mistaken for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import registry
from fp8doctor.checks.engagement import no_fp8_modules
from fp8doctor.checks.engagement.no_fp8_modules import FIRES
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.plan import prescribe
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Environment, Facts
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.stacks.torchao_private import CONVERTER_TRACE

Look = Callable[..., Facts]


def answer(facts: Facts) -> Finding | NotApplicable | None:
    return no_fp8_modules.no_fp8_modules(facts)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, bos_token_id=0, eos_token_id=0)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=512
        )
    )


@pytest.fixture
def prepare(forget_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What `accelerate launch --mixed_precision fp8` and a script of three lines do."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")

    def prepared(model: nn.Module, **settings: Any) -> Any:
        from accelerate import Accelerator

        return Accelerator(**settings).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

    return prepared


def test_conv1d_is_converted_by_nobody(prepare: Callable[..., Any], look: Look) -> None:
    finding = answer(look(prepare(gpt2())))
    assert isinstance(finding, Finding)
    assert finding.severity is None, "the check's own severity, an error"
    assert "8 of them are Conv1D" in finding.explanation
    assert finding.evidence["asked_by"] == "ACCELERATE_MIXED_PRECISION=fp8"
    assert finding.treatment is not None
    assert finding.treatment.name == "conv1d-to-linear"


def test_treatment_for_conv1d_makes_it_silent(prepare: Callable[..., Any], look: Look) -> None:
    model = gpt2()
    for parent in list(model.modules()):
        for name, conv1d in list(parent.named_children()):
            if type(conv1d).__name__ == "Conv1D":
                linear = nn.Linear(*conv1d.weight.shape)
                linear.weight.data, linear.bias.data = conv1d.weight.data.T.contiguous(), conv1d.bias.data
                setattr(parent, name, linear)
    assert answer(look(prepare(model))) is None


def test_a_model_that_accelerate_converted_is_healthy(prepare: Callable[..., Any], look: Look) -> None:
    assert answer(look(prepare(llama()))) is None


def test_before_prepare_it_is_information(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    finding = answer(look(llama()))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert finding.title == "FP8 was asked for; none of 15 Linears has it yet"


def test_before_prepare_the_advice_is_to_look_later(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    report = diagnose(look(llama()))
    assert report.verdict.status == "no_fp8"
    (finding,) = (each for each in report.findings if each.code == "MOD001")
    assert finding.severity == "info"


def test_a_training_step_is_proof_enough(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model(torch.ones(16, 64)).sum().backward()
    finding = answer(look(model))
    assert isinstance(finding, Finding)
    assert finding.severity is None
    assert finding.evidence["conversion_due"] == "a training step has run"
    assert "nothing else reads the request" in finding.explanation


def test_widths_that_the_converter_skips(prepare: Callable[..., Any], look: Look) -> None:
    finding = answer(look(prepare(nn.Sequential(*(nn.Linear(100, 100) for _ in range(4))))))
    assert isinstance(finding, Finding)
    assert "No Linear has both sides divisible by 16" in finding.explanation


def test_only_a_first_and_a_last_linear(prepare: Callable[..., Any], look: Look) -> None:
    finding = answer(look(prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))))
    assert isinstance(finding, Finding)
    assert "the first and the last" in finding.explanation


def test_nobody_asked(look: Look) -> None:
    assert answer(look(llama())) == NotApplicable(reason="nothing asks for FP8")


def test_eight_bits_of_bitsandbytes_are_not_fp8() -> None:
    layer = msgspec.structs.replace(
        FIRES.network.linears[0], stack="bitsandbytes", use="storage", dtype="int8"
    )
    finding = answer(
        msgspec.structs.replace(FIRES, network=msgspec.structs.replace(FIRES.network, linears=(layer,)))
    )
    assert isinstance(finding, Finding)


def test_an_overridden_request_is_treated_instead() -> None:
    check = next(check for check in registry.discover() if check.code == "MOD001")
    (finding,), _ = registry.run([check], FIRES)
    cause = msgspec.structs.replace(finding, code="ENV001", treatment=None)
    symptom = msgspec.structs.replace(finding, caused_by=check.explained_by)
    assert prescribe([cause, symptom]) == ()


def test_an_old_recording_without_variables_is_no_request() -> None:
    assert isinstance(
        answer(
            msgspec.structs.replace(
                FIRES,
                environment=Environment(),
                training=msgspec.structs.replace(FIRES.training, accelerate=None),
            )
        ),
        NotApplicable,
    )


@pytest.fixture
def uncalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where torchao's converter was not called yet."""
    import torchao.float8._inductor_patch

    monkeypatch.setattr(torchao.float8._inductor_patch, "_PATCHED", True)
    monkeypatch.delitem(sys.modules, CONVERTER_TRACE)


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def script(folder: Path, text: str) -> ModuleType:
    """What a file of this text became."""
    module = ModuleType("train")
    module.__file__ = str(folder / "train.py")
    (folder / "train.py").write_text(text)
    return module


def test_a_filter_that_matches_nothing_is_an_error(uncalled: None, look: Look) -> None:
    with ConversionWatch() as watch:
        model = convert_to_float8_training(pair(), module_filter_fn=lambda module, name: "layers." in name)
    facts = look(model, watched=watch)
    finding = answer(facts)
    assert isinstance(finding, Finding)
    assert finding.severity is None, "the check's own severity, an error"
    assert finding.title == "convert_to_float8_training was called but replaced none of 2 Linears"
    assert "such as '1'" in finding.explanation
    verdict = diagnose(facts).verdict
    assert verdict.status == "fp8_not_engaged"
    assert "replaced none of 2 Linears" in verdict.summary


def test_a_filter_is_not_blamed_where_the_layers_are_conv1d(uncalled: None, look: Look) -> None:
    with ConversionWatch() as watch:
        model = convert_to_float8_training(gpt2(), module_filter_fn=lambda module, name: name != "lm_head")
    finding = answer(look(model, watched=watch))
    assert isinstance(finding, Finding)
    assert "8 of them are Conv1D" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.name == "conv1d-to-linear"


def test_a_converter_that_replaced_linears_is_not_blamed(uncalled: None, look: Look) -> None:
    with ConversionWatch() as watch:
        converted, other = convert_to_float8_training(pair()), pair()
    assert isinstance(answer(look(converted, watched=watch)), NotApplicable)
    facts = look(other, watched=watch)
    assert isinstance(answer(facts), NotApplicable)
    assert diagnose(facts).verdict.status == "no_fp8"


def test_a_call_in_the_code_that_has_not_run(uncalled: None, look: Look, tmp_path: Path) -> None:
    with ConversionWatch() as watch:
        model = pair()
    watch.code = script(tmp_path, "if use_fp8:\n    convert_to_float8_training(model)\n")
    facts = look(model, watched=watch)
    assert answer(facts) == NotApplicable(reason="the code's call of convert_to_float8_training has not run")
    assert diagnose(facts).verdict.status == "no_fp8"


def test_a_call_that_nobody_could_see_is_information(look: Look, tmp_path: Path) -> None:
    """As after an earlier call in the same process, or with a torchao that leaves no trace of one."""
    convert_to_float8_training(pair())
    with ConversionWatch() as watch:
        model = pair()
    watch.code = script(tmp_path, "convert_to_float8_training(model, module_filter_fn=mine)\n")
    finding = answer(look(model, watched=watch))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert "could not see" in finding.explanation
    watch.code = script(tmp_path, "from torchao.float8 import convert_to_float8_training  # (model)\n")
    facts = look(model, watched=watch)
    assert isinstance(answer(facts), NotApplicable), "an import is no call"
    assert diagnose(facts).verdict.status == "no_fp8"
