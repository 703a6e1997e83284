"""The whole step of a recorded job of two H200s, whose compute a trial would have timed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fp8doctor import load_report
from fp8doctor.analysis.whole_step import FP8_WAITS, in_bounds, timed_alone, whole_step, whole_step_in_words
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from fp8doctor.render import text
from fp8doctor.render.box import answer
from tests.checks.arms import ran, timed

RECORDED = Path(__file__).parents[1] / "running" / "recorded"


def recorded_job(name: str = "h200x2-fsdp2_bf16_all_gather") -> Facts:
    return load_report(RECORDED / f"{name}.json.gz").facts


def with_trial(facts: Facts, fp8_ms: float, bf16_ms: float = 40.0) -> Facts:
    """FP8 as it is beside BF16."""
    arms = (
        ran("as_is", fp8_ms, window=1, fp8_gemms=72),
        *(ran(name, bf16_ms, window=1, base="as_is") for name in ("bf16", "bf16_compiled")),
    )
    return timed(facts, *arms)


def test_compute_scales_and_longer_compute_may_cover_communication() -> None:
    """52.8 ms: 12.8 of communication alone, 2.9 of wait for the other rank, and 37.1 of compute."""
    step = whole_step(with_trial(recorded_job(), 37.1))
    assert step is not None
    assert [round(ms, 1) for ms in (step.step_ms, step.communication_ms, step.ranks_ms)] == [52.8, 12.8, 2.9]
    low, high = step.over_bf16(46.4)
    assert low == pytest.approx((46.4 + 12.8 - 9.3) / 52.8, rel=2e-3)
    assert high == pytest.approx((46.4 + 15.7) / 52.8, rel=2e-3)
    assert step.over_bf16(29.7)[0] == pytest.approx((29.7 + 12.8) / 52.8, rel=2e-3)
    assert step.with_fp8(37.1, 29.7) == pytest.approx(52.8 / (15.7 + 29.7), rel=2e-3)
    assert step.with_fp8(37.1, 37.1) == 1.0


@pytest.mark.parametrize(
    ("bf16_ms", "compute", "whole"),
    [
        (46.4, "FP8 compute is 1.25x faster than BF16", "0.95x to 1.18x the speed of BF16"),
        (29.7, "FP8 compute is 1.25x slower than BF16", "1.16x to 1.24x slower"),
    ],
)
def test_the_screen_tells_both(bf16_ms: float, compute: str, whole: str) -> None:
    report = diagnose(with_trial(recorded_job(), 37.1, bf16_ms))
    told = (
        f"The whole step is {whole} (estimated): 24% of it is communication that no compute covers, "
        "its GPU waits 2.9 ms for another rank."
    )
    assert told in answer(report).limit
    assert told in report.verdict.summary
    assert whole in text.render(report)


def test_compute_that_gains_may_be_lost_in_the_whole_step() -> None:
    """As one H100 ran FSDP2 with an all-gather in FP8: 144 ms, copies 109.6 and 120.6, in BF16 130.1."""
    facts = with_trial(recorded_job(), 30.0, 33.0)
    families = {"cast": 30.0, "gemm_fp8": 20.0}
    breakdown = msgspec.structs.replace(facts.observed.breakdown, families_ms=families, idle_ms=2.8)
    observed = msgspec.structs.replace(facts.observed, breakdown=breakdown)
    arms = tuple(
        msgspec.structs.replace(
            each,
            breakdown=msgspec.structs.replace(
                breakdown, families_ms={"cast": 10.0, "gemm_fp8": 20.0}, idle_ms=0.0
            ),
        )
        for each in facts.arms()
    )
    trial = msgspec.structs.replace(facts.trial, arms=arms)
    report = diagnose(msgspec.structs.replace(facts, observed=observed, trial=trial))
    low, high = report.verdict.whole_step_low, report.verdict.whole_step_high
    assert low == pytest.approx(33.0 / 52.8, abs=0.01)
    assert high == pytest.approx((33.0 + 22.8) / 52.8, abs=0.01)
    told = answer(report)
    assert told.tone == "plain"


def test_a_job_that_waits_for_its_host_has_bounds() -> None:
    """As one H100 ran DDP: 68.9 ms, copies 56.5 in FP8 and 61.9 in BF16; plain, both took 64.8."""
    facts = recorded_job()
    observed = msgspec.structs.replace(facts.observed, steps_ms=(68.9 + 22.8,) * 3)
    facts = with_trial(msgspec.structs.replace(facts, observed=observed), 56.5)
    step = whole_step(facts)
    assert step is not None
    assert step.waiting_ms == pytest.approx(68.9 - 56.5, abs=0.1)
    whole_step_in_words(facts, 61.9 / 56.5, None, 61.9)
    _low, _high = 61.9 / 91.7, (68.9 + 5.4 + 22.8) / 91.7
    later = whole_step_in_words(facts, None, 1.10, 56.5)
    assert later.endswith(f", {FP8_WAITS}."), "why it has no lower bound"


@pytest.mark.parametrize(("fp8_ms", "bf16_ms"), [(100.0, 30.0), (120.0, 60.0), (60.0, 58.0)])
def test_a_copy_that_is_slower_than_the_job_bounds_nothing(fp8_ms: float, bf16_ms: float) -> None:
    report = diagnose(with_trial(recorded_job(), fp8_ms, bf16_ms))
    assert (report.verdict.whole_step_low, report.verdict.whole_step_high) == (None, None)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.99, 1.01, "about as fast as BF16"),
        (0.998, 0.998, "about as fast as BF16"),
        (0.8, 0.9, "1.11x to 1.25x slower"),
        (0.9, 1.1, "0.90x to 1.10x the speed of BF16"),
        (0.0, 1.1, "at most 1.10x the speed of BF16"),
    ],
)
def test_bounds_in_words(low: float, high: float, words: str) -> None:
    assert in_bounds(low, high) == words


def test_without_a_profiled_step_compute_is_all() -> None:
    facts = with_trial(recorded_job("h200x2-ddp_torchao"), 32.0)
    told = "Compute alone: how much of the step is communication was not profiled."
    assert whole_step_in_words(facts, 1.25, None, 40.0) == told


def test_a_job_of_one_process_is_told_nothing() -> None:
    facts = recorded_job()
    training = msgspec.structs.replace(facts.training, distributed=None)
    alone = msgspec.structs.replace(with_trial(facts, 52.8, 66.0), training=training)
    assert not timed_alone(alone)
    assert whole_step_in_words(alone, 1.25, None, 66.0) == ""
