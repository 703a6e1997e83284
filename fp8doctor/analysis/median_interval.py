"""The median of samples and an interval for the true one, whatever their distribution."""

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


def interval(samples: Sequence[float]) -> Interval:
    """Compute the sign-test interval of a median. Source: Conover, Practical Nonparametric Statistics, 3.2.

    With fewer than five samples no interval of that confidence exists, and the whole range is given.
    """
    from statistics import median  # 10 ms of start, for commands that only list the checks

    ordered, n = sorted(samples), len(samples)
    cut = 0
    while cut + 1 < n / 2 and 1 - 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n >= CONFIDENCE:
        cut += 1
    return Interval(median(ordered), ordered[cut], ordered[n - 1 - cut])
