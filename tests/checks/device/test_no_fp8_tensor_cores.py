"""GPU001 on GPUs that a stand-in NVML reports to the real examine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.diagnosis.engagement import without_its_symptoms
from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import Environment, Facts, Gpu, Linear, Network, Target
from fp8doctor.finding import Finding
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins.accelerate_state import accelerator
from tests.stand_ins.nvml import GIB, Device, StandIn, a100, gpu, h100


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, *devices: Device) -> Facts:
    StandIn(*devices).install(monkeypatch)
    return examine_surroundings(Target(kind="environment", name="environment"))


def test_an_a100_asked_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    finding = finding_of("GPU001", machine(monkeypatch, a100()))
    assert finding is not None
    assert finding.title == "NVIDIA A100-SXM4-80GB (8.0) has no FP8 tensor cores"
    assert finding.severity == "error"
    assert "Ampere has none" in finding.explanation
    assert finding.evidence == {
        "gpus": ("NVIDIA A100-SXM4-80GB",),
        "have": ("8.0",),
        "needed": "8.9",
        "fp8_wanted_by": "ACCELERATE_MIXED_PRECISION=fp8",
    }
    assert finding.treatment is not None
    assert 'mixed_precision="bf16"' in finding.treatment.code


def test_accelerate_turns_fp8_into_fp16(look: Callable[..., Facts]) -> None:
    with accelerator(None, a100()):
        facts = look(nn.Linear(64, 64))
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.mixed_precision == "fp16", "what the real AcceleratorState decided"
    finding = finding_of("GPU001", facts)
    assert finding is not None
    assert finding.severity == "error"
    assert "falls back to fp16" in finding.explanation


def test_the_treatment_leaves_information_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    finding = finding_of("GPU001", machine(monkeypatch, a100()))
    assert finding is not None
    assert (finding.severity, finding.treatment) == ("info", None)
    assert "you lose nothing" in finding.explanation


def test_fp8_layers_count_as_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Network(linears=(Linear(name="up", use="training"), Linear(name="head", use="none")))
    finding = finding_of("GPU001", msgspec.structs.replace(machine(monkeypatch, a100()), network=layers))
    assert finding is not None
    assert (finding.severity, finding.evidence["fp8_wanted_by"]) == ("error", "1 FP8 layer")


@pytest.mark.parametrize(
    ("capability", "outcome"),
    [
        *(((major, minor), "sick") for major, minor in ((7, 0), (7, 5), (8, 0), (8, 6), (8, 7))),
        *(
            ((major, minor), "healthy")
            for major, minor in ((8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
        ),
    ],
)
def test_the_line_is_8_9(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], outcome: str) -> None:
    assert (
        outcome_of("GPU001", machine(monkeypatch, gpu("NVIDIA X", "GPU-1", capability, 24))).outcome
        == outcome
    )


def test_before_ampere_the_other_precision_is_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    finding = finding_of("GPU001", machine(monkeypatch, gpu("Tesla V100-SXM2-32GB", "GPU-1", (7, 0), 32)))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.name == "fp16-on-this-gpu"


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert outcome_of("GPU001", machine(monkeypatch, a100(), h100())).outcome == "healthy"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    finding = finding_of("GPU001", machine(monkeypatch, a100(), h100()))
    assert finding is not None
    assert finding.title == "1 of 2 GPUs have no FP8 tensor cores: NVIDIA A100-SXM4-80GB (8.0)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert outcome_of("GPU001", machine(monkeypatch, a100(), h100())).outcome == "not_applicable"


def test_unknown_where_it_is_unknown_which_gpu_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    outcome = outcome_of("GPU001", machine(monkeypatch, a100(), h100()))
    assert outcome.outcome == "unknown"
    assert outcome.reason is not None
    assert "CUDA_DEVICE_ORDER" in outcome.reason


@pytest.mark.parametrize(
    ("architecture", "outcome"),
    [
        ("gfx90a", "sick"),
        ("gfx942:sramecc+:xnack-", "healthy"),
        ("gfx950", "healthy"),
        ("gfx1100", "sick"),
        ("gfx1201", "healthy"),
        ("gfx1250", "healthy"),
    ],
)
def test_amd_by_architecture(monkeypatch: pytest.MonkeyPatch, architecture: str, outcome: str) -> None:
    properties = SimpleNamespace(name="AMD Instinct", total_memory=192 * GIB, gcnArchName=architecture)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    facts = examine_surroundings(Target(kind="environment", name="environment"))
    assert outcome_of("GPU001", facts).outcome == outcome
    if outcome == "sick":
        finding = finding_of("GPU001", facts)
        assert finding is not None
        assert architecture.partition(":")[0] in finding.title


@pytest.mark.parametrize(
    ("name", "outcome"), [("A100", "sick"), ("L40S", "healthy"), (None, "not_applicable")]
)
def test_the_gpu_that_is_assumed_where_there_is_none(name: str | None, outcome: str) -> None:
    layer = Linear(name="up", stack="torchao", use="training")
    facts = Facts(
        environment=Environment(variables={}), gpus=(), network=Network(linears=(layer,)), assumed_gpu=name
    )
    assert outcome_of("GPU001", facts).outcome == outcome
    if outcome == "sick":
        finding = finding_of("GPU001", facts)
        assert finding is not None
        assert finding.severity == "error"
        assert finding.title == "A100 (8.0) has no FP8 tensor cores"


@pytest.mark.slow
def test_on_such_a_gpu_it_is_told_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """How FP8 would have to be compiled, or shaped, is nothing to mend where it cannot run."""
    model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)))
    for name, told in (("A100", {"GPU001"}), ("H100", {"CMP001", "SHP002"})):
        report = inspect_model(model, torch.ones(16, 32), trial=False, assume_gpu=name)
        assert {each.code for each in report.findings if each.area != "memory"} == told
    finding = finding_of("GPU001", of_an_a100(model))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.code == "# remove the conversion to FP8", "no launcher asked for it"


def test_nothing_that_is_told_there_names_a_cause_that_is_not() -> None:
    found = [
        Finding(title="no FP8", explanation="", code="GPU001", breaks="step_raises"),
        Finding(title="not compiled", explanation="", code="CMP001", caused_by=("GPU001",)),
        Finding(title="frozen", explanation="", code="CKP001", caused_by=("CMP001", "GPU001")),
    ]
    left, _ = without_its_symptoms(found, ())
    assert [(each.code, each.caused_by) for each in left] == [("GPU001", ()), ("CKP001", ("GPU001",))]


def of_an_a100(model: torch.nn.Module) -> Facts:
    return inspect_model(model, torch.ones(16, 32), trial=False, assume_gpu="A100").facts


def test_a_gpu_that_does_not_tell_its_capability_is_unknown() -> None:
    facts = Facts(
        environment=Environment(variables={}), gpus=(Gpu(name="NVIDIA X", vendor="nvidia", visible=True),)
    )
    assert outcome_of("GPU001", facts).outcome == "unknown"
