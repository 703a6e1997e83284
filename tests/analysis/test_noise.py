"""The median's interval, and a disturbed host that made the compared steps noisy or turned them."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import msgspec
import pytest

from fp8doctor.analysis.significance import interval
from fp8doctor.analysis.step_difference import waits_for_the_host
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, HostLoad
from tests.checks.arms import timed
from tests.checks.step.profiled import profiled, replaced
from tests.facts_of import DECODER_468M


def load(**fields: Any) -> HostLoad:
    """A quiet host, but for these fields."""
    quiet = {
        "pace_low_ms": 0.3,
        "pace_median_ms": 0.3,
    }
    return HostLoad(**{"cores": 16, "others_pct": 10.0, **quiet, **fields})


def rounds(arm: Arm, *rounds_ms: float) -> Arm:
    return msgspec.structs.replace(
        arm, rounds_ms=rounds_ms, low_ms=min(rounds_ms), high_ms=max(rounds_ms), step_ms=median(rounds_ms)
    )


FLUX_LIKE = rounds(
    profiled("as_is", 67.4, host_wait_pct=96.5, gemm_fp8=19.7, cast=15.9, attention=7.0, pointwise=17.1),
    *(67.6, 67.4, 67.0, 69.7, 63.0),
)
ITS_BF16 = rounds(
    profiled("bf16_compiled", 65.8, host_wait_pct=95.1, gemm_16bit=37.2, attention=7.1, pointwise=17.2),
    *(66.3, 65.6, 66.7, 65.8, 65.8),
)
"""A 1.7B image model on an H200 whose host was slow: too noisy to tell, and too busy to wait for the host."""
SLOW = load(pace_median_ms=0.53)
STEADY = rounds(replaced(FLUX_LIKE, idle_ms=6.3), *(66.2, 66.0, 66.1, 65.9, 66.0))
"""Even with its BF16, where the kernels alone make FP8 faster."""
AS_FAST = rounds(
    profiled("bf16_compiled", 65.8, host_wait_pct=95.1, gemm_16bit=36.2, attention=7.1, pointwise=16.2),
    *ITS_BF16.rounds_ms,
)
"""Even with it by the kernels alone too."""


def beside_it(as_is: Arm, bf16: Arm = ITS_BF16, host: HostLoad = SLOW, **fields: Any) -> Facts:
    facts = timed(DECODER_468M, as_is, bf16)
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, host=host, **fields))


def test_a_timing_too_noisy_to_tell_names_the_host_that_disturbed_it() -> None:
    report = diagnose(beside_it(FLUX_LIKE))
    assert report.verdict.status == "open"
    assert not waits_for_the_host(FLUX_LIKE)
    assert report.answer.doubts
    assert report.answer.open


def slower(*rounds_ms: float) -> Arm:
    """The same kernels, 1.10x of the BF16 beside them, in steps that wait for the host."""
    found = profiled(
        "as_is", 70.0, host_wait_pct=96.5, gemm_fp8=19.7, cast=15.9, attention=7.0, pointwise=17.1
    )
    return rounds(found, *rounds_ms)


LONG_BF16 = rounds(ITS_BF16, *[65.8] * 16)


def test_a_sign_that_wavers_with_the_host_is_not_told() -> None:
    """A quarter of the rounds is ahead of BF16, as all may be on a quiet host."""
    report = diagnose(beside_it(slower(*[70.0, 71.0, 72.0] * 4, *[60.0] * 4), LONG_BF16))
    assert report.verdict.status == "open"
    assert report.answer.doubts


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
    assert diagnose(small(20.0, 9.9, turned)).verdict.status == status


BUSY_GPU = rounds(
    profiled("as_is", 67.4, host_wait_pct=96.5, gemm_fp8=19.7, cast=25.9, attention=7.0, pointwise=13.1),
    *FLUX_LIKE.rounds_ms,
)


@pytest.mark.parametrize(
    "facts",
    [
        beside_it(STEADY, AS_FAST),
        beside_it(FLUX_LIKE, host=load()),
        beside_it(FLUX_LIKE, device="cpu"),
        beside_it(replaced(FLUX_LIKE, host_wait_pct=20.0), replaced(ITS_BF16, host_wait_pct=20.0)),
        beside_it(BUSY_GPU, replaced(ITS_BF16, idle_ms=1.0)),
    ],
    ids=[
        "it is told",
        "a quiet host",
        "on a CPU",
        "the gaps have another cause",
        "idle for no more than what is even",
    ],
)
def test_no_host_is_named_that_hides_nothing(facts: Facts) -> None:
    assert "the host was busy" not in diagnose(facts).answer.doubts


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
