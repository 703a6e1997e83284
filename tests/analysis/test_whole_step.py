"""The whole step of a recorded job of two H200s, whose compute a trial would have timed."""

from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.significance import Number
from fp8doctor.analysis.watched import whole_speedup
from fp8doctor.answer.comparison import Comparison
from fp8doctor.answer.record import Answer
from fp8doctor.answer.sentences import box
from fp8doctor.cost.step_cost import with_linears_compiled
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts
from tests.checks.arms import ran, timed

RECORDED = Path(__file__).parents[1] / "running" / "recorded"


def recorded_job(name: str = "h200x2-fsdp2_bf16_all_gather") -> Facts:
    return load_report(RECORDED / f"{name}.json.gz").facts


def with_trial(facts: Facts, fp8_ms: float, bf16_ms: float = 40.0) -> Facts:
    """FP8 as it is beside BF16."""
    arms = (
        ran("as_is", fp8_ms, fp8_gemms=72),
        *(ran(name, bf16_ms, base="as_is") for name in ("bf16", "bf16_compiled")),
    )
    return timed(facts, *arms)


def steady(facts: Facts) -> Facts:
    """Give each step the time of the median one."""
    steps_ms = (median(facts.observed.steps_ms),) * 10
    return replace(facts, observed=replace(facts.observed, steps_ms=steps_ms))


def bounds_of(facts: Facts, speedup: float, bf16_ms: float, *, has_fp8: bool = True) -> tuple[float, float]:
    found = whole_speedup(facts, Number(speedup, speedup, speedup), bf16_ms, has_fp8=has_fp8)
    assert found is not None
    return found


def test_compute_scales_and_longer_compute_may_cover_communication() -> None:
    """52.8 ms: 12.8 of communication alone, 2.9 of wait for the other rank, and 37.1 of compute."""
    facts = with_trial(steady(recorded_job()), 37.1)
    slower = bounds_of(facts, 46.4 / 37.1, 46.4)
    assert slower == pytest.approx(((46.4 + 12.8 - 9.3) / 52.8, (46.4 + 15.7) / 52.8), rel=2e-3)
    assert bounds_of(facts, 29.7 / 37.1, 29.7)[0] == pytest.approx((29.7 + 12.8) / 52.8, rel=2e-3)
    assert bounds_of(facts, 37.1 / 29.7, 37.1, has_fp8=False) == pytest.approx(
        (0.0, 52.8 / (15.7 + 29.7)), rel=2e-3
    )


@pytest.mark.parametrize(
    ("bf16_ms", "compute", "whole", "is_open"),
    [(46.4, 1.25, (0.95, 1.18), True), (29.7, 0.80, (1 / 1.24, 1 / 1.16), False)],
)
def test_the_screen_tells_both(
    bf16_ms: float, compute: float, whole: tuple[float, float], is_open: bool
) -> None:
    said = diagnose(with_trial(steady(recorded_job()), 37.1, bf16_ms)).answer
    assert said.is_compute
    assert (said.speedup.value, *said.whole) == pytest.approx((compute, *whole), abs=0.01)
    assert bool(said.open) is is_open
    assert {"title.whole"} <= {each.template for each in box(said).lines}


def test_a_job_that_waits_for_its_host_has_bounds() -> None:
    """As one H100 ran DDP: 68.9 ms, copies 56.5 in FP8 and 61.9 in BF16; plain, both took 64.8."""
    facts = recorded_job()
    observed = replace(facts.observed, steps_ms=(68.9 + 22.8,) * 3)
    facts = with_trial(replace(facts, observed=observed), 56.5)
    bounds = bounds_of(facts, 61.9 / 56.5, 61.9)
    assert bounds == pytest.approx((61.9 / 91.7, (68.9 + 5.4 + 22.8) / 91.7), abs=0.01)
    assert bounds_of(facts, 1.10, 56.5, has_fp8=False)[0] == 0, "FP8 may wait longer"


def test_steps_that_vary_widen_the_bounds() -> None:
    job = recorded_job()
    narrow = bounds_of(with_trial(steady(job), 37.1), 46.4 / 37.1, 46.4)
    wide = bounds_of(with_trial(job, 37.1), 46.4 / 37.1, 46.4)
    assert wide[0] < narrow[0]
    assert wide[1] > narrow[1]


@pytest.mark.parametrize(("fp8_ms", "bf16_ms"), [(100.0, 30.0), (120.0, 60.0), (60.0, 58.0)])
def test_a_copy_that_is_slower_than_the_job_bounds_nothing(fp8_ms: float, bf16_ms: float) -> None:
    report = diagnose(with_trial(recorded_job(), fp8_ms, bf16_ms))
    assert (report.verdict.whole_step_low, report.verdict.whole_step_high) == (None, None)


def test_a_watched_step_refutes_a_model_that_is_far_slower() -> None:
    """Uncompiled casts would take longer than the whole step did, so that no BF16 is left to estimate."""
    facts = recorded_job("h200x2-ddp_torchao_1b")
    assert diagnose(facts).answer.speedup is not None
    assert diagnose(with_linears_compiled(facts, yes=False)).answer.speedup is None


@pytest.mark.parametrize(
    ("whole", "tells"),
    [
        ((0.0, 1.2), True),
        ((0.0, 1.3), False),
        ((1.1, 1.2), True),
        ((0.5, 1.2), False),
        ((0.2, 0.8), True),
        (None, False),
    ],
)
def test_a_bound_of_the_whole_step_is_told_if_it_says_more_than_its_compute(
    whole: tuple[float, float] | None, tells: bool
) -> None:
    compared = Comparison(speedup=Number(1.25, 1.2, 1.3))
    said = Answer(status="fp8_faster", has_fp8=True, compared=compared, whole=whole)
    assert (said.whole_bounds is not None) == tells
