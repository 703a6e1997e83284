"""The whole step of a recorded job of two H200s, whose compute a trial would have timed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fp8doctor import load_report
from fp8doctor.analysis.whole_step import timed_alone, whole_step, whole_step_in_words
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from fp8doctor.render import text
from fp8doctor.render.box import answer
from tests.checks.arms import ran, timed

RECORDED = Path(__file__).parents[1] / "running" / "recorded"


def recorded_job(name: str = "h200x2-fsdp2_bf16_all_gather") -> Facts:
    return load_report(RECORDED / f"{name}.json.gz").facts


def with_trial(facts: Facts, fp8_ms: float) -> Facts:
    """FP8 as it is beside BF16 of 40 ms."""
    arms = (
        ran("as_is", fp8_ms, window=1, fp8_gemms=72),
        *(ran(name, 40.0, window=1, base="as_is") for name in ("bf16", "bf16_compiled")),
    )
    return timed(facts, *arms)


def test_communication_stays_and_compute_scales() -> None:
    """52.8 ms, 22.8 ms of them communication alone: 30.0 ms of compute become 37.5."""
    step = whole_step(recorded_job())
    assert step is not None
    assert (round(step.step_ms, 1), round(step.communication_ms, 1)) == (52.8, 22.8)
    assert step.speedup(1.25) == pytest.approx((22.8 + 30.0 * 1.25) / 52.8, rel=2e-3)
    assert step.speedup_with(1.25) == pytest.approx(52.8 / (22.8 + 30.0 / 1.25), rel=2e-3)
    assert step.speedup(1.0) == step.speedup_with(1.0) == 1.0


@pytest.mark.parametrize(
    ("fp8_ms", "headline", "whole"),
    [
        (32.0, "FP8 compute is 1.25x faster than BF16", "The whole step is about 1.14x faster (estimated)"),
        (50.0, "FP8 compute is 1.25x slower than BF16", "The whole step is about 1.13x slower (estimated)"),
    ],
)
def test_the_screen_tells_both(fp8_ms: float, headline: str, whole: str) -> None:
    report = diagnose(with_trial(recorded_job(), fp8_ms))
    assert answer(report).what == headline
    told = f"{whole}: 43% of it is communication that no compute covers."
    assert told in answer(report).limit
    assert told in report.verdict.summary
    assert whole in text.render(report)


def test_a_job_that_waits_for_its_host_has_bounds() -> None:
    """As one H100 ran DDP: 68.9 ms, copies 56.5 in FP8 and 61.9 in BF16; plain, both took 64.8."""
    facts = recorded_job()
    observed = msgspec.structs.replace(facts.observed, steps_ms=(68.9 + 22.8,) * 3)
    facts = with_trial(msgspec.structs.replace(facts, observed=observed), 56.5)
    step = whole_step(facts)
    assert step is not None
    assert step.waiting_ms == pytest.approx(68.9 - 56.5, abs=0.1)
    told = whole_step_in_words(facts, 61.9 / 56.5, None)
    low, high = (61.9 + 22.8) / 91.7, (68.9 + 5.4 + 22.8) / 91.7
    assert told.startswith(
        f"The whole step runs at {low:.2f}x to {high:.2f}x the speed of BF16 (estimated): "
    )
    assert told.endswith("and its GPU waits 12.4 ms.")
    would = whole_step_in_words(facts, None, 1.10)
    assert would.startswith("The whole step would be at most ")


def test_without_a_profiled_step_compute_is_all() -> None:
    facts = with_trial(recorded_job("h200x2-ddp_torchao"), 32.0)
    told = "Compute alone: how much of the step is communication was not profiled."
    assert whole_step_in_words(facts, 1.25, None) == told


def test_a_job_of_one_process_is_told_nothing() -> None:
    facts = recorded_job()
    training = msgspec.structs.replace(facts.training, distributed=None)
    alone = msgspec.structs.replace(with_trial(facts, 32.0), training=training)
    assert not timed_alone(alone)
    assert whole_step_in_words(alone, 1.25, None) == ""
    assert answer(diagnose(alone)).what == "FP8 is 1.25x faster than BF16"
