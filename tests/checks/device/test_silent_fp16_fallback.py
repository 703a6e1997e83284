"""GPU003: the real AcceleratorState falls back on a stand-in for torch's current device, beside one for
NVML."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from torch import nn

from fp8doctor.checks.device.silent_fp16_fallback import HEALTHY, SICK
from fp8doctor.facts import NOT_RECORDED, Facts, Gpu, TrainerArguments
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins.accelerate_state import accelerator
from tests.stand_ins.nvml import Device, a100, gpu, h100

Look = Callable[..., Facts]


@pytest.fixture
def job(look: Look) -> Callable[..., Facts]:
    """Facts of a plain model beside an Accelerator on a machine with these GPUs; the first is torch's current
    device."""

    def made(precision: str | None, *devices: Device, variable: str | None = "fp8") -> Facts:
        with accelerator(precision, *devices, variable=variable):
            return look(nn.Linear(64, 64))

    return made


def test_an_a100_turns_fp8_into_fp16(job: Callable[..., Facts]) -> None:
    facts = job(None, a100())
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.mixed_precision == "fp16", "what the real AcceleratorState decided"
    finding = finding_of("GPU003", facts)
    assert finding is not None
    assert finding.severity == "error"
    assert finding.title == "Accelerate fell back from fp8 to fp16 because of NVIDIA A100-SXM4-80GB (8.0)"
    assert finding.treatment is not None
    assert finding.treatment.name == "bf16-on-this-gpu"
    assert 'mixed_precision="bf16"' in finding.treatment.code
    assert outcome_of("GPU001", facts).outcome == "sick", "the cause, with the same treatment"
    assert outcome_of("ENV001", facts).outcome == "not_applicable"


def test_the_treatment_makes_it_silent(job: Callable[..., Facts]) -> None:
    assert outcome_of("GPU003", job("bf16", a100(), variable=None)).outcome == "not_applicable"


def test_an_h100_keeps_fp8(job: Callable[..., Facts]) -> None:
    facts = job(None, h100())
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.mixed_precision == "fp8"
    assert outcome_of("GPU003", facts).outcome == "not_applicable"


def test_an_old_gpu_that_is_hidden_takes_nothing(job: Callable[..., Facts]) -> None:
    """torch's current device is the first that is visible, and nothing else decides."""
    facts = job(None, h100(), a100())
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.mixed_precision == "fp8"
    hidden = msgspec.structs.replace(SICK.gpus[0], visible=False)
    newer = msgspec.structs.replace(hidden, visible=True, compute_capability="9.0")
    other = msgspec.structs.replace(SICK, gpus=(hidden, newer))
    assert outcome_of("GPU003", other).outcome == "not_applicable", "fp16 has another cause"


def test_an_old_current_device_takes_fp8_from_a_newer_gpu(job: Callable[..., Facts]) -> None:
    finding = finding_of("GPU003", job(None, a100(), h100()))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.name == "bf16-on-this-gpu"


def test_fp16_is_right_on_a_v100(job: Callable[..., Facts]) -> None:
    assert (
        outcome_of("GPU003", job(None, gpu("Tesla V100-SXM2-16GB", "GPU-c1", (7, 0), 16))).outcome
        == "not_applicable"
    )


def test_fp16_that_was_asked_for_is_no_fallback() -> None:
    trainer = TrainerArguments(
        kind="transformers.training_args.TrainingArguments", bf16=False, fp16=True, mixed_precision="fp16"
    )
    asked = msgspec.structs.replace(SICK, training=msgspec.structs.replace(SICK.training, trainer=trainer))
    assert outcome_of("GPU003", asked).outcome == "healthy"
    nobody = msgspec.structs.replace(SICK, environment=NOT_RECORDED)
    assert outcome_of("GPU003", nobody).outcome == "not_applicable"


def test_an_amd_gpu_has_no_compute_capability() -> None:
    amd = Gpu(
        name="AMD Instinct MI300X", vendor="amd", compute_capability=None, architecture="gfx942", visible=True
    )
    assert outcome_of("GPU003", msgspec.structs.replace(HEALTHY, gpus=(amd,))).outcome == "not_applicable"
