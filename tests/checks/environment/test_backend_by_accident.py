"""ENV008 on what the real Accelerate does with a backend that nobody named, and with one that was named
without FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.checks.environment.backend_by_accident import FIRES, SILENT
from fp8doctor.facts import Environment, Facts, Linear, Network, Package, Software, TrainerArguments
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]


def four() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.fixture(autouse=True)
def _torchao_is_loaded(forget_accelerate: None) -> None:
    import torchao.float8

    assert torchao.float8


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Transformer Engine is installed beside torchao: a stand-in for the package, which nothing imports."""
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('a stand-in')")
    info = tmp_path / "transformer_engine-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """What the real `prepare` makes of a model when the environment says fp8."""
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = four()
    done: nn.Module = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    return done


@pytest.mark.parametrize(
    ("backend", "happens"),
    [("AO", "'NoneType' object has no attribute 'config'"), ("TE", "trains the model in FP8")],
)
def test_a_backend_without_fp8(
    monkeypatch: pytest.MonkeyPatch, look: Look, backend: str, happens: str
) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    Accelerator(mixed_precision="bf16", cpu=True)
    finding = finding_of("ENV008", look(four()))
    assert finding is not None
    assert finding.severity == "error"
    now = f"ACCELERATE_FP8_BACKEND={backend} is set, but the precision is bf16"
    assert finding.title.startswith(f"{now}: none of ")
    assert happens in finding.explanation
    assert finding.treatment is not None
    asks = "ACCELERATE_FP8_BACKEND=AO accelerate launch --mixed_precision fp8"
    assert finding.treatment.code.startswith(asks if backend == "AO" else "unset ACCELERATE_FP8_BACKEND")
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND")
    assert outcome_of("ENV008", look(four())).outcome == "not_applicable"


def test_the_real_prepare_raises_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    model = four()
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'config'"):
        Accelerator(mixed_precision="bf16", cpu=True).prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )


def test_precision_of_the_launcher_and_of_a_trainer(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    from transformers import TrainingArguments

    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    assert outcome_of("ENV008", look(four())).outcome == "not_applicable", "nothing has decided the precision"
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], bf16=True)
    finding = finding_of("ENV008", look(four(), trainer=arguments))
    assert finding is not None
    assert (finding.severity, finding.evidence["precision"]) == ("error", "bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    finding = finding_of("ENV008", look(four()))
    assert finding is not None
    assert finding.severity == "warning", "nothing shows that this job calls prepare"


def test_where_fp8_was_asked_for_another_check_says_who_overrode_it(
    monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    Accelerator(mixed_precision="bf16", cpu=True)
    facts = look(four())
    assert outcome_of("ENV001", facts).outcome == "sick"
    assert outcome_of("ENV008", facts).outcome == "healthy"


def test_two_backends_and_none_named(both: None, prepared: nn.Module, look: Look) -> None:
    finding = finding_of("ENV008", look(prepared))
    assert finding is not None
    assert finding.severity == "warning", "AORecipeKwargs may have been passed"
    assert "2 Linears became Float8Linear" in finding.explanation
    assert finding.treatment is not None
    backend, launch = finding.treatment.code.splitlines()
    assert backend.startswith("export ACCELERATE_FP8_BACKEND=AO "), "naming it does not change it"
    assert "--dynamo_use_regional_compilation" in launch


def test_before_prepare_it_is_information(both: None, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    finding = finding_of("ENV008", look(four()))
    assert finding is not None
    assert finding.severity == "info"


def test_a_trainer_passes_no_recipe(both: None, prepared: nn.Module, look: Look) -> None:
    facts = look(prepared)
    trainer = TrainerArguments(
        kind="transformers.training_args.TrainingArguments", bf16=False, fp16=False, mixed_precision="fp8"
    )
    finding = finding_of(
        "ENV008",
        msgspec.structs.replace(facts, training=msgspec.structs.replace(facts.training, trainer=trainer)),
    )
    assert finding is not None
    assert finding.severity == "error"


def test_compiled_torchao_is_no_accident(both: None, prepared: nn.Module, look: Look) -> None:
    prepared.compile()
    assert outcome_of("ENV008", look(prepared)).outcome == "healthy"


def test_naming_one_is_healthy(
    both: None, prepared: nn.Module, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    assert outcome_of("ENV008", look(prepared)).outcome == "healthy"


def test_having_one_is_healthy(prepared: nn.Module, look: Look) -> None:
    facts = look(prepared)
    if "transformer_engine" in facts.software.packages:
        pytest.skip("Transformer Engine is installed")
    assert outcome_of("ENV008", facts).outcome == "healthy"


def test_transformer_engine_layers_without_a_name_were_chosen_by_a_recipe() -> None:
    layer = Linear(name="up", stack="transformer_engine", use="training", compiled=None)
    packages = {
        name: Package(version="1.15.0", imported=True)
        for name in ("accelerate", "torchao", "transformer_engine")
    }
    facts = msgspec.structs.replace(
        SILENT,
        software=Software(packages=packages),
        environment=Environment(variables={"ACCELERATE_MIXED_PRECISION": "fp8"}),
        network=Network(linears=(layer,)),
    )
    assert outcome_of("ENV008", facts).outcome == "healthy"


def test_older_versions_do_otherwise() -> None:
    def with_version(version: str) -> Facts:
        return msgspec.structs.replace(
            FIRES, software=Software(packages={"accelerate": Package(version=version, imported=True)})
        )

    assert [
        outcome_of("ENV008", with_version(each)).outcome for each in ("1.3.0", "1.8.1", "1.9.0", "1.15.0")
    ] == [
        "not_applicable",
        "not_applicable",
        "sick",
        "sick",
    ]
