"""The side of a speedup, at its boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.analysis.significance import EVEN, Number

SPEEDUPS = st.floats(0.05, 20.0)


@pytest.mark.parametrize(
    ("value", "low", "high", "side"),
    [
        (0.9, 0.85, 0.95, "slower"),
        (0.9, 0.85, 1.0, "open"),
        (1 - EVEN, 0.96, 0.98, "slower"),
        (0.98, 0.971, 0.99, "even"),
        (1.0, 1.0, 1.0, "even"),
        (1.0, 0.97, 1.05, "even"),
        (1.0, 0.97, 1.2, "open"),
        (1.02, 1.01, 1.7, "open"),
        (1.0, 0.96, 1.04, "open"),
        (1.02, 1.01, 1.029, "even"),
        (1.1, 1.05, 1.15, "faster"),
        (1.1, 1.0, 1.15, "open"),
    ],
)
def test_the_side(value: float, low: float, high: float, side: str) -> None:
    assert Number(value, low, high).side == side


@given(st.tuples(SPEEDUPS, SPEEDUPS, SPEEDUPS).map(sorted))
def test_a_side_is_one_of_its_interval(of: list[float]) -> None:
    low, value, high = of
    found = Number(value, low, high)
    assert found.side != "faster" or low > 1
    assert found.side != "slower" or high < 1
