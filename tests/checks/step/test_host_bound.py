"""STP001: real models; the idle time is put together, because a CPU that computes cannot wait for itself."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, Observation, TrainerArguments
from tests.checks.arms import timed
from tests.checks.models import float8, mlp
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.checks.step.profiled import BF16, FP8_EAGER, breakdown, profiled, replaced
from tests.facts_of import DECODER_468M
from tests.stand_ins import transformer_engine

pytestmark = pytest.mark.slow

HOST = "host-bound"
WAITING = profiled("as_is", 41.5, host_wait_pct=92.0, gemm_fp8=4.0, cast=2.0, pointwise=8.5)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return transformer_engine.install(monkeypatch)


@pytest.fixture
def in_te(te: ModuleType, look: Look) -> Facts:
    return look(nn.Sequential(te.Linear(1024, 1024, bias=False)), tokens=256)


def test_late_launches(in_te: Facts) -> None:
    finding = found_by(HOST, timed(in_te, WAITING))
    assert (finding.evidence["idle_ms"], finding.evidence["host_wait_pct"]) == (pytest.approx(27.0), 92.0)


@pytest.mark.parametrize(
    ("accumulate", "batch_size", "kind", "code"),
    [
        (8, 4, "trl.trainer.sft_config.SFTConfig", "batch_size=8, gradient_accumulation_steps=4)"),
        (9, None, "trl.trainer.sft_config.SFTConfig", "batch_size=3 * BATCH, gradient_accumulation_steps=3)"),
        (1, 4, None, "batch_size = 8   # samples in a micro-batch, 4 now"),
    ],
)
def test_more_work_per_launch_in_the_words_of_the_job(
    in_te: Facts, accumulate: int, batch_size: int | None, kind: str | None, code: str
) -> None:
    given = {"accumulate": accumulate, "batch_size": batch_size, "batch_source": "given"}
    training = replace(in_te.training, trainer=TrainerArguments(kind=kind) if kind else None)
    facts = replace(in_te, workload=replace(in_te.workload, **given), training=training)
    treatment = fix_of(HOST, timed(facts, WAITING))
    assert treatment.name == "larger-batch"
    assert treatment.code.endswith(code)


def test_what_is_not_compiled_is_compiled_first(look: Look) -> None:
    assert fix_of(HOST, timed(look(float8(mlp()), tokens=256), WAITING)).name.startswith("compile-")


def test_it_is_information_where_fp8_is_faster_and_without_fp8(in_te: Facts, look: Look) -> None:
    slower = profiled("bf16", 60.0, host_wait_pct=95.0, gemm_16bit=10.0)
    plain = look(nn.Sequential(nn.Linear(64, 64)), tokens=256)
    for facts in (timed(in_te, WAITING, slower), timed(plain, WAITING)):
        assert found_by(HOST, facts).severity == "info"


@pytest.mark.parametrize(
    "arm",
    [
        replaced(FP8_EAGER, host_wait_pct=99.0),
        replaced(WAITING, host_wait_pct=10.0),
        replaced(WAITING, host_wait_pct=None),
        profiled("as_is", 100.0, host_wait_pct=92.0, gemm_fp8=91.0),
    ],
    ids=["the GPU is busy with casts", "gaps of another kind", "no gaps were seen", "9% idle"],
)
def test_it_is_silent(in_te: Facts, arm: Arm) -> None:
    assert outcome_of(HOST, timed(in_te, arm, BF16)) == "silent"


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
    assert outcome_of(HOST, facts) == outcome
    assert ("its data" in diagnose(facts).answer.causes[0].title) is ("data_ms" in seen)


def on_meta(kind: Callable[[int, int], nn.Module], width: int) -> nn.Module:
    """Pairs of layers, as many as a small decoder has."""
    with torch.device("meta"):
        pairs = (nn.Sequential(kind(width, 4 * width), kind(4 * width, width)) for _ in range(24))
        return nn.Sequential(*pairs).bfloat16()


def test_a_narrow_model_that_was_not_timed_stays_in_bf16(te: ModuleType, look: Look) -> None:
    finding = found_by(HOST, look(on_meta(te.Linear, 512), tokens=1024))
    assert finding.evidence["host_ms"] > finding.evidence["busy_ms"]  # type: ignore[operator]
    assert (finding.evidence["fp8_layers"], finding.treatment.name) == (48, "stay-in-bf16")


def test_a_wide_model_wants_more_tokens_and_has_enough_with_them(te: ModuleType, look: Look) -> None:
    model = on_meta(te.Linear, 2048)
    finding = found_by(HOST, look(model, tokens=256))
    assert finding.treatment.name == "more-tokens"
    tokens = finding.evidence["pays_from_tokens"]
    assert 512 <= tokens <= 16_384
    assert finding_of(HOST, look(model, tokens=tokens)) is None


def test_what_is_not_modelled_is_left_to_the_trial(te: ModuleType, look: Look) -> None:
    in_bf16 = on_meta(te.Linear, 512)
    in_bf16(torch.zeros(16, 512, dtype=torch.bfloat16, device="meta"))
    pays = look(on_meta(te.Linear, 4096), tokens=16_384)
    one = look(on_meta(te.Linear, 512), tokens=1024)
    rows = {each.name: (1024,) for each in one.network.linears}
    two = replace(one, workload=replace(one.workload, tokens=None, rows=rows))  # of unlike sequences
    for facts in (DECODER_468M, pays, look(in_bf16, tokens=1024), two):
        assert outcome_of(HOST, facts) == "unknown"
