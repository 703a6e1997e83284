"""The interval of a median."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.analysis.significance import interval


@pytest.mark.slow
@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=40))
def test_the_interval_holds_the_median_and_stays_within_the_samples(samples: list[float]) -> None:
    at = interval(samples)
    assert min(samples) <= at.low <= at.median <= at.high <= max(samples)
    assert at.median == statistics.median(samples)


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
