"""GPU005: what is said where there is no GPU, and who hid it."""

from __future__ import annotations

import msgspec
import pynvml
import pytest
import torch

from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import Facts, Target
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins.nvml import Device, StandIn, a100, gpu, h100


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def machine(
    monkeypatch: pytest.MonkeyPatch,
    *devices: Device,
    cuda: str | None = "13.0",
    on_init: Exception | None = None,
) -> Facts:
    StandIn(*devices, on_init=on_init).install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return examine_surroundings(Target(kind="environment", name="environment"))


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = finding_of(
        "GPU005", machine(monkeypatch, cuda=None, on_init=pynvml.NVMLError_LibraryNotFound())
    )
    assert finding is not None
    assert finding.title == "No GPU here; times are estimated for H100"
    assert finding.severity == "info"
    assert finding.evidence == {
        "gpus": 0,
        "hidden": 0,
        "modelled": "H100",
        "modelled_from": "NVIDIA H100 SXM datasheet, 2023",
    }
    assert "Unknown without a GPU" in finding.explanation
    assert finding.treatment is not None
    assert "--assume-gpu" in finding.treatment.code


def test_the_assumed_gpu_is_named_and_nothing_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine(monkeypatch, cuda=None, on_init=pynvml.NVMLError_LibraryNotFound())
    finding = finding_of("GPU005", msgspec.structs.replace(facts, assumed_gpu="l40s"))
    assert finding is not None
    assert finding.title == "No GPU here; times are estimated for L40S"
    assert finding.treatment is None


def test_a_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of("GPU005", machine(monkeypatch, h100())).outcome == "not_applicable"


def test_a_gpu_that_may_or_may_not_be_visible_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert outcome_of("GPU005", machine(monkeypatch, a100(), h100())).outcome == "not_applicable"


@pytest.mark.parametrize(
    ("devices", "title"),
    [
        (1, "The only GPU is hidden by CUDA_VISIBLE_DEVICES='-1'"),
        (2, "All 2 GPUs are hidden by CUDA_VISIBLE_DEVICES='-1'"),
    ],
)
def test_hidden_gpus_are_no_gpus(monkeypatch: pytest.MonkeyPatch, devices: int, title: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    finding = finding_of("GPU005", machine(monkeypatch, *(h100(f"GPU-{i}") for i in range(devices))))
    assert finding is not None
    assert finding.title.startswith(title)
    assert finding.evidence["hidden"] == devices


def test_a_torch_without_cuda_uses_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = finding_of("GPU005", machine(monkeypatch, h100(), cuda=None))
    assert finding is not None
    assert finding.title.startswith(
        f"torch {torch.__version__} is built without CUDA and does not use the NVIDIA H100 80GB HBM3"
    )
    assert finding.treatment is not None
    assert finding.treatment.name == "install-cuda-torch"


def test_a_gpu_without_a_datasheet_models_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = finding_of("GPU005", machine(monkeypatch, gpu("NVIDIA L20", "GPU-c1", (8, 9), 24), cuda=None))
    assert finding is not None
    assert finding.title.endswith("does not use the NVIDIA L20; no times are estimated")
    assert finding.explanation.startswith("fp8doctor knows no datasheet for this GPU. ")
    assert finding.evidence["modelled"] is None


def test_a_broken_driver_is_unknown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of("GPU005", machine(monkeypatch, on_init=pynvml.NVMLError_LibRmVersionMismatch()))
    assert outcome.outcome == "unknown"
    assert outcome.reason is not None
    assert "mismatch" in outcome.reason
