"""The median's interval, and a disturbed host that made the compared steps noisy or turned them."""

import random
from statistics import median

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.significance import Number, interval
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, HostLoad, Trial
from tests.checks.arms import timed
from tests.checks.step.profiled import profiled
from tests.facts_of import DECODER_468M

SLOW = HostLoad(pace_low_ms=0.3, pace_median_ms=0.53)


def rounds(arm: Arm, *rounds_ms: float) -> Arm:
    return replace(
        arm, rounds_ms=rounds_ms, low_ms=min(rounds_ms), high_ms=max(rounds_ms), step_ms=median(rounds_ms)
    )


def beside_it(as_is: Arm, bf16: Arm) -> Facts:
    facts = timed(DECODER_468M, as_is, bf16)
    return replace(facts, trial=replace(facts.trial, host=SLOW))


def small(as_is_ms: float, rounds_ms: float, turned: int) -> Facts:
    """A model whose host sets the pace, at 1.8 times its best: FP8 has the faster kernels and more launches,
    BF16 takes 10 ms. Some rounds of FP8 in thirty take another time."""
    fp8, bf16 = (
        profiled(name, ms, host_wait_pct=95.0, pointwise=busy_ms)
        for name, ms, busy_ms in (("as_is", as_is_ms, 5.0), ("bf16_compiled", 10.0, 7.0))
    )
    return beside_it(
        rounds(fp8, *[as_is_ms] * (30 - turned), *[rounds_ms] * turned), rounds(bf16, *[10.0] * 30)
    )


@pytest.mark.parametrize(("turned", "status"), [(7, "fp8_slower"), (8, "open")])
def test_a_quarter_of_the_rounds_of_a_busy_host_leaves_it_open(turned: int, status: str) -> None:
    report = diagnose(small(20.0, 9.9, turned))
    assert report.verdict.status == status
    assert report.answer.doubts
    assert bool(report.answer.open) is (status == "open")


@pytest.mark.parametrize(("samples", "low", "high"), [(6, 1, 6), (8, 2, 7), (11, 3, 9), (15, 4, 12)])
def test_the_interval_is_the_sign_tests(samples: int, low: int, high: int) -> None:
    at = interval([float(i) for i in range(1, samples + 1)])
    assert (at.low, at.high) == (low, high)


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    covered = sum(
        at.low <= 0.0 <= at.high
        for at in (interval([generator.gauss(0, 1) for _ in range(9)]) for _ in range(2000))
    )
    assert 0.94 < covered / 2000 < 0.98


def test_what_processes_differ_by_adds_as_an_error_of_its_own() -> None:
    step = Arm(name="as_is", tried=True, step_ms=100.0, low_ms=98.0, high_ms=101.0)
    trial = Trial(device="cuda", arms=(step,))
    found = script_interval(step, trial)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((97.5, 101.8), abs=0.05)
    on_cpu = replace(trial, device="cpu")
    assert script_interval(step, on_cpu) == Number(100.0, 98.0, 101.0)
    assert script_interval(replace(step, low_ms=None, high_ms=None), trial) is None
