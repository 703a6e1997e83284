"""MOD006 on models that the real `Accelerator.prepare` converted, over a stand-in for Transformer Engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.checks.engagement.hidden_fp8 import FIRES, SILENT
from fp8doctor.facts import NOT_RECORDED, Accelerate, Environment, Facts, TrainerArguments
from tests.checks.engagement import accelerated
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine

Look = Callable[..., Facts]
Prepare = Callable[..., Any]


def with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, forget_accelerate: None) -> Prepare:
    """A model as `prepare` leaves it, by an Accelerator of this precision with this backend in the
    environment."""

    def prepared(precision: str, backend: str | None) -> Any:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        accelerated.prepare(monkeypatch, *with_optimizer())  # installs the stand-in
        library = sys.modules["transformer_engine.pytorch"]
        monkeypatch.setattr(
            library,
            "fp8_autocast",
            lambda enabled, fp8_recipe: transformer_engine.autocast(enabled, fp8_recipe),
        )
        AcceleratorState._reset_state(reset_partial_state=True)
        if backend:
            monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
        model, _ = Accelerator(mixed_precision=precision, cpu=True).prepare(*with_optimizer())
        model(torch.ones(16, 64)).sum().backward()
        return model

    return prepared


def test_a_backend_makes_a_bf16_run_an_fp8_run(prepare: Prepare, look: Look) -> None:
    facts = look(prepare("bf16", "TE"))
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.te_autocast is True
    finding = finding_of("MOD006", facts)
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "3 of 3 Linears run in FP8 although Accelerate's precision is bf16"
    assert "ACCELERATE_FP8_BACKEND=TE" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.code.startswith("unset ACCELERATE_FP8_BACKEND")
    assert outcome_of("ENV008", facts).outcome == "sick", "the cause, which is treated instead"


def test_unset_or_said_it_is_silent(prepare: Prepare, look: Look) -> None:
    assert outcome_of("MOD006", look(prepare("bf16", None))).outcome == "not_applicable"


def test_with_fp8_said_it_is_healthy(prepare: Prepare, look: Look) -> None:
    facts = look(prepare("fp8", "TE"))
    assert outcome_of("MOD006", facts).outcome == "healthy"
    assert outcome_of("ENV008", facts).outcome == "healthy"


def test_compiling_the_model_does_not_hide_it(prepare: Prepare, look: Look) -> None:
    assert outcome_of("MOD006", look(torch.compile(prepare("bf16", "TE")))).outcome == "sick"


def test_layers_that_the_script_converted_are_no_accident(look: Look, forget_accelerate: None) -> None:
    from accelerate import Accelerator
    from torchao.float8 import convert_to_float8_training

    model, optimizer = with_optimizer()
    model, _ = Accelerator(mixed_precision="bf16", cpu=True).prepare(
        convert_to_float8_training(model), optimizer
    )
    assert outcome_of("MOD006", look(model)).outcome == "not_applicable"


def test_layers_that_ran_in_bf16_are_not_hidden_fp8() -> None:
    layer = msgspec.structs.replace(FIRES.network.linears[0], engaged=False)
    assert (
        outcome_of(
            "MOD006",
            msgspec.structs.replace(FIRES, network=msgspec.structs.replace(FIRES.network, linears=(layer,))),
        ).outcome
        == "not_applicable"
    )


def test_under_deepspeed_the_state_says_no_for_bf16() -> None:
    training = msgspec.structs.replace(
        SILENT.training,
        accelerate=Accelerate(mixed_precision="no", distributed="DEEPSPEED", prepared=True, te_autocast=True),
    )
    finding = finding_of("MOD006", msgspec.structs.replace(SILENT, training=training))
    assert finding is not None
    assert finding.evidence["precision"] == "bf16"


def test_a_state_that_was_made_anew_is_said_to_be() -> None:
    finding = finding_of("MOD006", msgspec.structs.replace(FIRES, environment=NOT_RECORDED))
    assert finding is not None
    assert "was reset since" in finding.explanation


def test_where_the_launcher_asks_for_fp8_the_flags_give_way() -> None:
    """Without the backend the job would be overridden (ENV001), and so the first line is FP8's."""
    asked = {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_MIXED_PRECISION": "fp8"}
    arguments = TrainerArguments(kind="trl.SFTConfig", bf16=True, fp16=False, mixed_precision="bf16")
    facts = msgspec.structs.replace(
        FIRES,
        environment=Environment(variables=asked),
        training=msgspec.structs.replace(FIRES.training, trainer=arguments),
    )
    finding = finding_of("MOD006", facts)
    assert finding is not None
    assert "ACCELERATE_MIXED_PRECISION=fp8 asked for that, and only the flags say bf16" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.code.splitlines()[-2:] == [
        "args = SFTConfig(..., bf16=False, fp16=False)   # for FP8",
        "# for BF16: unset ACCELERATE_FP8_BACKEND ACCELERATE_MIXED_PRECISION",
    ]
    without = finding_of("MOD006", msgspec.structs.replace(facts, training=FIRES.training))
    assert without is not None
    assert without.treatment is not None
    assert 'accelerator = Accelerator(mixed_precision="fp8")' in without.treatment.code
