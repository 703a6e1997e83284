"""Medians with confidence intervals; which ratio is faster, even or slower."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

CONFIDENCE = 0.90
"""Share of cases in which the interval holds the true median, at least."""


class Interval(Struct, frozen=True):
    """A median and the interval that holds the true one with `CONFIDENCE`."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median


def interval(samples: Sequence[float]) -> Interval:
    """Compute the sign-test interval of a median.

    With fewer than five samples it is the whole range. Source: Conover, Practical Nonparametric Statistics,
    3.2.
    """
    from statistics import median  # 10 ms of start, for commands that only list the checks

    ordered, n = sorted(samples), len(samples)
    cut = 0
    while cut + 1 < n / 2 and 1 - 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n >= CONFIDENCE:
        cut += 1
    return Interval(median(ordered), ordered[cut], ordered[n - 1 - cut])


EVEN = 0.03
"""A speedup within this of 1 is called even. A convention of this tool."""


LITTLE = 1.10
"""Upper bound of FP8's speedup below which its casts leave no gain: the least that torchao reports at 8B (10%
more throughput)."""


def side(speedup: float) -> int:
    """Tell faster, 1, from even, 0, and slower, -1."""
    return 0 if abs(speedup - 1) < EVEN else 1 if speedup > 1 else -1


def is_even(speedup: Interval) -> bool:
    """Return whether a speedup is called even, or its interval holds 1."""
    return speedup.low <= 1 <= speedup.high or not side(speedup.median)


def is_decided(speedup: Interval) -> bool:
    """Return whether the interval excludes 1 or is all even; more rounds do not help."""
    return not speedup.low <= 1 <= speedup.high or (speedup.low >= 1 - EVEN and speedup.high <= 1 + EVEN)
