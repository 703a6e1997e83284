"""STP001: real models; the idle time is put together, because a CPU that computes cannot wait for itself."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.step.host_bound import host_bound
from fp8doctor.facts import Arm, Facts, TrainerArguments
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import timed
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.step.conftest import with_arms
from tests.checks.step.profiled import BF16, FP8_EAGER, profiled, replaced, unprofiled
from tests.stand_ins import transformer_engine

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]

WAITING = profiled("as_is", 41.5, host_wait_pct=92.0, gemm_fp8=4.0, cast=2.0, pointwise=8.5)
BUSY = profiled("as_is", 41.5, host_wait_pct=92.0, gemm_fp8=4.0, cast=26.0, pointwise=10.5)
SMALL_BF16 = profiled("bf16_compiled", 13.2, host_wait_pct=80.0, gemm_16bit=7.0, pointwise=4.0)


def in_te(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    transformer_engine.install(monkeypatch)
    return nn.Sequential(transformer_engine.Linear(1024, 1024, bias=False))


def test_late_launches(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = host_bound(timed(look(in_te(monkeypatch), tokens=256), WAITING, SMALL_BF16))
    assert isinstance(finding, Finding)
    assert finding.title == "The GPU is idle for 65% of the step, waiting for the host"
    assert finding.explanation == (
        "The GPU has nothing to do for 27.0 of 41.5 ms, and 92% of its gaps end with a late launch. "
        "A step launches 2,000 kernels of 7 µs on average. "
        "The best BF16 step launches 2,000 and is idle for 2.2 of 13.2 ms."
    )
    assert finding.treatment is not None
    assert finding.treatment.name == "larger-batch"
    assert host_bound(timed(look(in_te(monkeypatch), tokens=512), BUSY, SMALL_BF16)) is None


@pytest.mark.parametrize(("release", "told"), [("2.13.0", True), ("2.16.0", False)])
def test_an_old_release_of_the_layers_is_named_where_the_host_limits(
    look: Look, monkeypatch: pytest.MonkeyPatch, release: str, told: bool
) -> None:
    facts = with_releases(look(in_te(monkeypatch), tokens=256), transformer_engine=release)
    finding = host_bound(timed(facts, WAITING, SMALL_BF16))
    assert isinstance(finding, Finding)
    assert ("Engine 2.13.0 is installed; 2.16 and newer need less host" in finding.explanation) is told


def test_bf16_and_a_prescription_that_keep_the_gpu_busy_or_do_not(look: Look) -> None:
    """As a ViT on an H200: 104.8 of 137.7 ms, 25.8 of 34.5 compiled, 11.9 of 18.5 in BF16."""
    facts = look(convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)).bfloat16()), tokens=3152)
    still = profiled("prescribed", 34.5, host_wait_pct=99.0, gemm_fp8=2.1, cast=3.7, pointwise=2.9)
    bf16 = profiled("bf16", 18.5, host_wait_pct=98.0, gemm_16bit=3.1, pointwise=3.5)
    finding = host_bound(timed(facts, WAITING, bf16, still))
    assert isinstance(finding, Finding)
    assert finding.explanation.endswith(
        " idle for 11.9 of 18.5 ms: the host limits it too, which FP8 cannot change. With the timed fixes it "
        "is still idle for 25.8 of 34.5 ms; try more tokens per step or CUDA graphs."
    )
    busy = replaced(bf16, host_wait_pct=20.0)
    mended = host_bound(
        timed(
            facts,
            WAITING,
            busy,
            profiled("prescribed", 9.0, host_wait_pct=99.0, gemm_fp8=4.0, cast=2.0, pointwise=2.5),
        )
    )
    assert isinstance(mended, Finding)
    assert mended.explanation.endswith("idle for 11.9 of 18.5 ms."), (
        "the gaps of BF16 are not the host's, and the changes mend FP8"
    )


@pytest.mark.slow
def test_the_kernels_of_a_real_step_are_counted(sick: Facts) -> None:
    real = sick.trial.arms[0]
    assert real.breakdown
    assert real.step_ms
    busy = real.breakdown.busy_ms
    waiting = msgspec.structs.replace(replaced(real, idle_ms=busy, host_wait_pct=80.0), step_ms=2 * busy)
    finding = host_bound(with_arms(sick, waiting))
    assert isinstance(finding, Finding)
    assert finding.evidence["kernels"] == real.breakdown.kernels > 100
    assert finding.evidence["idle_pct"] == pytest.approx(50.0)
    assert host_bound(sick) is None


def test_what_is_eager_is_compiled_first(look: Look) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)).bfloat16())
    finding = host_bound(timed(look(model, tokens=256), WAITING))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name.startswith("compile-")


@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_is_compiled_gets_more_work_per_launch(look: Look, accumulate: int) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)).bfloat16())
    compiled = look(torch.compile(model), tokens=256)
    facts = msgspec.structs.replace(
        compiled, workload=msgspec.structs.replace(compiled.workload, accumulate=accumulate)
    )
    finding = host_bound(timed(facts, WAITING))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "larger-batch"


TRAINER = TrainerArguments(kind="trl.trainer.sft_config.SFTConfig")


@pytest.mark.parametrize(
    ("accumulate", "batch_size", "trainer", "code"),
    [
        (8, 4, TRAINER, "SFTConfig(..., per_device_train_batch_size=8, gradient_accumulation_steps=4)"),
        (3, 4, TRAINER, "SFTConfig(..., per_device_train_batch_size=12, gradient_accumulation_steps=1)"),
        (
            9,
            None,
            TRAINER,
            "SFTConfig(..., per_device_train_batch_size=3 * BATCH, gradient_accumulation_steps=3)",
        ),
        (1, 4, TRAINER, "SFTConfig(..., per_device_train_batch_size=8)"),
        (1, 4, None, "batch_size = 8   # samples in a micro-batch, 4 now"),
        (
            2,
            4,
            None,
            "batch_size = 8   # samples in a micro-batch, 4 now\naccumulate = 1   # "
            "micro-batches in a "
            "step, 2 now",
        ),
    ],
)
def test_a_larger_batch_in_the_words_of_the_job(
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
    accumulate: int,
    batch_size: int | None,
    trainer: TrainerArguments | None,
    code: str,
) -> None:
    facts = look(in_te(monkeypatch), tokens=256)
    workload = msgspec.structs.replace(
        facts.workload, accumulate=accumulate, batch_size=batch_size, batch_source="given"
    )
    facts = msgspec.structs.replace(
        facts, workload=workload, training=msgspec.structs.replace(facts.training, trainer=trainer)
    )
    finding = host_bound(timed(facts, WAITING))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "larger-batch"
    assert finding.treatment.code.removeprefix("from trl import SFTConfig\n") == code


def test_it_is_information_where_fp8_is_faster_and_without_fp8(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = profiled("bf16", 60.0, host_wait_pct=95.0, gemm_16bit=10.0)
    faster = host_bound(timed(look(in_te(monkeypatch), tokens=256), WAITING, slower))
    plain = host_bound(timed(look(nn.Sequential(nn.Linear(64, 64)), tokens=256), WAITING))
    assert isinstance(faster, Finding)
    assert isinstance(plain, Finding)
    assert (faster.severity, plain.severity) == ("info", "info")


SILENT = {
    "uncompiled FP8 at many tokens: the GPU is busy": replaced(FP8_EAGER, host_wait_pct=99.0),
    "gaps of another kind": replaced(WAITING, host_wait_pct=10.0),
    "no gaps were seen": replaced(WAITING, host_wait_pct=None),
}


@pytest.mark.parametrize("arm", SILENT.values(), ids=SILENT)
def test_it_is_silent(look: Look, monkeypatch: pytest.MonkeyPatch, arm: Arm) -> None:
    assert host_bound(timed(look(in_te(monkeypatch), tokens=256), arm, BF16)) is None


@pytest.mark.parametrize(
    "arm", [unprofiled("as_is", 41.5), replaced(WAITING, reliable=False)], ids=["not profiled", "unreliable"]
)
def test_there_is_no_answer(look: Look, monkeypatch: pytest.MonkeyPatch, arm: Arm) -> None:
    assert isinstance(host_bound(timed(look(in_te(monkeypatch), tokens=256), arm)), NotApplicable)


def test_a_cpu_is_not_judged(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(
        host_bound(timed(look(in_te(monkeypatch), tokens=256), WAITING, device="cpu")), NotApplicable
    )
