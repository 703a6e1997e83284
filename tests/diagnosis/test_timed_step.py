"""The steps of two reports."""

from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.diagnosis.two_reports import cautions, timed_step
from fp8doctor.facts import Arm, Facts, Observation, Trial
from tests.facts_of import DECODER_468M
from tests.replays import TESTS


def timed(ms: float = 100.0) -> Facts:
    rounds: dict[str, Any] = {"step_ms": ms, "low_ms": ms, "high_ms": ms, "rounds_ms": (ms,) * 7}
    arm = Arm(name="as_is", tried=True, peak_gib=20.0, graphs_run=0, **rounds)
    trial = Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=(arm,), reliable=True)
    return replace(DECODER_468M, trial=trial)


def test_rates_are_those_of_the_step() -> None:
    step = timed_step(timed(), "a")
    assert (step.tokens_per_s, step.peak_gib) == (163840.0, 20.0)
    assert step.measured_on == "NVIDIA H200"
    twice = replace(timed(), workload=replace(DECODER_468M.workload, accumulate=2))
    assert timed_step(twice, "a").tokens_per_s == 2 * 163840.0


@pytest.mark.parametrize(("clock", "where"), [("cuda", "the GPU"), ("host", "the host's clock")])
def test_steps_of_a_watched_script_count_where_no_trial_timed_a_copy(clock: Any, where: str) -> None:
    observed = Observation(steps_ms=(110.0, 100.0, 90.0), clock=clock, compiled=2)
    facts = replace(DECODER_468M, observed=observed)
    step = timed_step(facts, "a")
    assert (step.step_ms, step.low_ms, step.high_ms) == (100.0, 90.0, 110.0)
    assert (step.tokens_per_s, step.measured_on, step.missing) == (163840.0, where, "")
    both = replace(facts, trial=timed(50.0).trial)
    assert timed_step(both, "a").step_ms == 50.0
    assert list(cautions(both, timed_step(both, "a"))) == []


def test_features_are_no_tokens() -> None:
    """Its input has 131,072 features; its layers see 8,192 rows."""
    facts = load_report(TESTS / "patients" / "recorded" / "h200-cast_heavy_layer.json.gz").facts
    assert timed_step(facts, "").step_ms
    assert timed_step(facts, "").tokens_per_s is None
