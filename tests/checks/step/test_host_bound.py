"""STP001: real models; the idle time is put together, because a CPU that computes cannot wait for itself."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.checks.step.host_bound import host_bound
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, Observation, TrainerArguments
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import timed
from tests.checks.environment.live import finding_of, outcome_of
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.step.conftest import with_arms
from tests.checks.step.profiled import BF16, FP8_EAGER, breakdown, profiled, replaced, unprofiled
from tests.facts_of import DECODER_468M
from tests.stand_ins import transformer_engine

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]

WAITING = profiled("as_is", 41.5, host_wait_pct=92.0, gemm_fp8=4.0, cast=2.0, pointwise=8.5)
SMALL_BF16 = profiled("bf16_compiled", 13.2, host_wait_pct=80.0, gemm_16bit=7.0, pointwise=4.0)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return transformer_engine.install(monkeypatch)


@pytest.fixture
def in_te(te: ModuleType, look: Look) -> Facts:
    return look(nn.Sequential(te.Linear(1024, 1024, bias=False)), tokens=256)


def in_torchao() -> nn.Module:
    return convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)).bfloat16())


def found(facts: Facts) -> Finding:
    finding = host_bound(facts)
    assert isinstance(finding, Finding)
    return finding


def test_late_launches(in_te: Facts) -> None:
    finding = found(timed(in_te, WAITING, SMALL_BF16))
    assert finding.title == "The GPU is idle for 65% of the step, waiting for the host"
    assert finding.explanation == (
        "The GPU has nothing to do for 27.0 of 41.5 ms, and 92% of its gaps end with a late launch. "
        "A step launches 2,000 kernels of 7 µs on average. "
        "The best BF16 step launches 2,000 and is idle for 2.2 of 13.2 ms."
    )
    for release, told in (("2.13.0", True), ("2.16.0", False)):
        of_release = timed(with_releases(in_te, transformer_engine=release), WAITING, SMALL_BF16)
        said = "Engine 2.13.0 is installed; 2.16 and newer need less host" in found(of_release).explanation
        assert said is told


def test_bf16_and_a_plan_that_keep_the_gpu_busy_or_do_not(look: Look) -> None:
    """As a ViT on an H200: 104.8 of 137.7 ms, 25.8 of 34.5 compiled, 11.9 of 18.5 in BF16."""
    facts = look(in_torchao(), tokens=3152)
    still = profiled("prescribed", 34.5, host_wait_pct=99.0, gemm_fp8=2.1, cast=3.7, pointwise=2.9)
    mended = profiled("prescribed", 9.0, host_wait_pct=99.0, gemm_fp8=4.0, cast=2.0, pointwise=2.5)
    bf16 = profiled("bf16", 18.5, host_wait_pct=98.0, gemm_16bit=3.1, pointwise=3.5)
    assert found(timed(facts, WAITING, bf16, still)).explanation.endswith(
        " idle for 11.9 of 18.5 ms: the host limits it too, which FP8 cannot change. With the timed fixes it "
        "is still idle for 25.8 of 34.5 ms; try more tokens per step or CUDA graphs."
    )
    other_gaps = timed(facts, WAITING, replaced(bf16, host_wait_pct=20.0), mended)
    assert found(other_gaps).explanation.endswith("idle for 11.9 of 18.5 ms.")


def test_the_kernels_of_a_real_step_are_counted(sick: Facts) -> None:
    real = sick.trial.arms[0]
    assert real.breakdown
    busy = real.breakdown.busy_ms
    waiting = replace(replaced(real, idle_ms=busy, host_wait_pct=80.0), step_ms=2 * busy)
    finding = found(with_arms(sick, waiting))
    assert finding.evidence["kernels"] == real.breakdown.kernels > 100
    assert finding.evidence["idle_pct"] == pytest.approx(50.0)
    assert host_bound(sick) is None


SFT = "SFTConfig(..., per_device_train_batch_size="
MORE_SAMPLES = "batch_size = 8   # samples in a micro-batch, 4 now"
TRAINER = TrainerArguments(kind="trl.trainer.sft_config.SFTConfig")


@pytest.mark.parametrize(
    ("accumulate", "batch_size", "trainer", "code"),
    [
        (8, 4, TRAINER, f"{SFT}8, gradient_accumulation_steps=4)"),
        (3, 4, TRAINER, f"{SFT}12, gradient_accumulation_steps=1)"),
        (9, None, TRAINER, f"{SFT}3 * BATCH, gradient_accumulation_steps=3)"),
        (1, 4, TRAINER, f"{SFT}8)"),
        (1, 4, None, MORE_SAMPLES),
        (2, 4, None, f"{MORE_SAMPLES}\naccumulate = 1   # micro-batches in a step, 2 now"),
    ],
)
def test_more_work_per_launch_in_the_words_of_the_job(
    look: Look,
    in_te: Facts,
    accumulate: int,
    batch_size: int | None,
    trainer: TrainerArguments | None,
    code: str,
) -> None:
    given = {"accumulate": accumulate, "batch_size": batch_size, "batch_source": "given"}
    compiled = look(torch.compile(in_torchao()), tokens=256)
    for facts in (in_te, compiled):
        training = replace(facts.training, trainer=trainer)
        facts = replace(facts, workload=replace(facts.workload, **given), training=training)
        treatment = found(timed(facts, WAITING)).treatment
        assert treatment
        assert treatment.name == "larger-batch"
        assert treatment.code.removeprefix("from trl import SFTConfig\n") == code
    eager = found(timed(look(in_torchao(), tokens=256), WAITING)).treatment
    assert eager
    assert eager.name.startswith("compile-"), "what is not compiled is compiled first"


def test_it_is_information_where_fp8_is_faster_and_without_fp8(in_te: Facts, look: Look) -> None:
    slower = profiled("bf16", 60.0, host_wait_pct=95.0, gemm_16bit=10.0)
    plain = look(nn.Sequential(nn.Linear(64, 64)), tokens=256)
    for facts in (timed(in_te, WAITING, slower), timed(plain, WAITING)):
        assert found(facts).severity == "info"


SILENT = {
    "uncompiled FP8 at many tokens: the GPU is busy": replaced(FP8_EAGER, host_wait_pct=99.0),
    "gaps of another kind": replaced(WAITING, host_wait_pct=10.0),
    "no gaps were seen": replaced(WAITING, host_wait_pct=None),
    "9% idle": profiled("as_is", 100.0, host_wait_pct=92.0, gemm_fp8=91.0),
}


@pytest.mark.parametrize("arm", SILENT.values(), ids=SILENT)
def test_it_is_silent(in_te: Facts, arm: Arm) -> None:
    assert host_bound(timed(in_te, arm, BF16)) is None


def test_there_is_no_answer(in_te: Facts) -> None:
    for arm in (unprofiled("as_is", 41.5), replaced(WAITING, reliable=False)):
        assert isinstance(host_bound(timed(in_te, arm)), NotApplicable)
    assert isinstance(host_bound(timed(in_te, WAITING, device="cpu")), NotApplicable)


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        ({}, "fires"),
        ({"behind_ms": (40.0,) * 10}, "silent"),
        ({"data_ms": (65.0,) * 10}, "silent"),
        ({"clock": "host"}, "unknown"),
    ],
    ids=["a script that waits", "the host is ahead", "it waits for data", "a CPU"],
)
def test_a_watched_script(seen: dict[str, Any], outcome: str) -> None:
    observed = Observation(
        **{"steps_ms": (100.0,) * 10, "clock": "cuda", "data_ms": None, "before_forward_ms": None} | seen,
        fp8_gemms=12,
        graphs_run=0,
        host_copies_ms=0.0,
        breakdown=breakdown(100.0, host_wait_pct=90.0, gemm_fp8=20.0, cast=10.0),
    )
    facts = replace(DECODER_468M, observed=observed)
    assert outcome_of("STP001", facts).outcome == outcome
    assert ("its data" in diagnose(facts).answer.causes[0].title) is ("data_ms" in seen)


class Mlp(nn.Module):
    """Pairs of layers, as many as a small decoder has."""

    def __init__(self, kind: Callable[[int, int], nn.Module], width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(kind(width, 4 * width) for _ in range(24))
        self.down = nn.ModuleList(kind(4 * width, width) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(up(x))
        return x


def on_meta(kind: Callable[[int, int], nn.Module], width: int) -> Mlp:
    with torch.device("meta"):
        return Mlp(kind, width).bfloat16()


@pytest.mark.parametrize("ran", [False, True], ids=["before its first forward", "after it"])
def test_a_narrow_model_that_was_not_timed_stays_in_bf16(ran: bool, te: ModuleType, look: Look) -> None:
    model = on_meta(te.Linear, 512)
    if ran:
        with te.autocast(enabled=True, recipe=transformer_engine.DelayedScaling()):
            model(torch.zeros(16, 512, dtype=torch.bfloat16, device="meta"))
    finding = finding_of("STP001", look(model, tokens=1024))
    assert finding
    assert finding.title.endswith("(estimated)")
    assert finding.evidence["host_ms"] > finding.evidence["busy_ms"]  # type: ignore[operator]
    assert (finding.evidence["fp8_layers"], finding.treatment.name) == (48, "stay-in-bf16")


def test_a_wide_model_wants_more_tokens_and_has_enough_with_them(te: ModuleType, look: Look) -> None:
    model = on_meta(te.Linear, 2048)
    finding = finding_of("STP001", look(model, tokens=256))
    assert finding
    assert finding.treatment.name == "more-tokens"
    tokens = finding.evidence["pays_from_tokens"]
    assert isinstance(tokens, int)
    assert 512 <= tokens <= 16_384
    assert finding_of("STP001", look(model, tokens=tokens)) is None


def test_what_is_not_modelled_is_left_to_the_trial(te: ModuleType, look: Look) -> None:
    in_bf16 = on_meta(te.Linear, 512)
    in_bf16(torch.zeros(16, 512, dtype=torch.bfloat16, device="meta"))
    pays = look(on_meta(te.Linear, 4096), tokens=16_384)
    for facts in (DECODER_468M, pays, look(in_bf16, tokens=1024)):
        assert outcome_of("STP001", facts).outcome == "unknown"
