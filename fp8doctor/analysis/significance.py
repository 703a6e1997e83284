"""Medians with their intervals; times and speedups with the interval and the basis of what is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor.finding import Basis

CONFIDENCE = 0.90
"""Share of cases in which the interval holds the true median, at least."""


def interval(samples: Sequence[float]) -> Number:
    """Compute a median, and the interval of the sign test that holds the true one with `CONFIDENCE`.

    With fewer than five samples it is the whole range. Source: Conover, Practical Nonparametric Statistics,
    3.2.
    """
    from statistics import median  # 10 ms of start, for commands that only list the checks

    ordered, n = sorted(samples), len(samples)
    cut = 0
    while cut + 1 < n / 2 and 1 - 2 * sum(math.comb(n, i) for i in range(cut + 2)) / 2**n >= CONFIDENCE:
        cut += 1
    return Number(median(ordered), ordered[cut], ordered[n - 1 - cut])


EVEN = 0.03
"""A speedup within this of 1 is called even. A convention of this tool."""

LITTLE = 1.10
"""Upper bound of FP8's speedup below which its casts leave no gain: the least that torchao reports at 8B (10%
more throughput)."""

Side = Literal["slower", "even", "faster", "open"]

WIDEST = 1.6
"""High / low end of a speedup, or of a time, from which its size is open, whatever its side."""

WIDE = 1.1
"""High / low end of a speedup near 1, from which it is open: most fixes give less. A choice."""


class Number(Struct, frozen=True):
    """A time in ms, or a speedup: one time / another. The interval holds 90% of what may be true."""

    value: float
    low: float
    high: float
    basis: Basis = "measured"

    @property
    def side(self) -> Side:
        """Say on which side of 1 a speedup is: even within 3%, open if the interval allows another answer."""
        if abs(self.value - 1) < EVEN:
            beyond = self.low < 1 - EVEN and self.high > 1 + EVEN
            return "open" if beyond or self.high >= WIDE * self.low else "even"
        if self.low <= 1 <= self.high:
            return "open"
        return "faster" if self.value > 1 else "slower"

    @property
    def has_open_size(self) -> bool:
        """Return whether the size of a speedup, or of a time, is open; its near end may be known."""
        return self.high >= WIDEST * self.low


def holding(value: float, low: float, high: float, basis: Basis = "measured") -> Number:
    """Make a number whose interval holds it."""
    return Number(value, min(low, value), max(high, value), basis)
