"""A time or a speedup with its interval and its basis."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.significance import EVEN, Interval
from fp8doctor.finding import Basis

Side = Literal["slower", "even", "faster", "open"]

WIDE = 1.1
"""High / low end of a speedup from which its size is not sure: most fixes of a compiled step give less. A
convention of this tool."""


class Number(Struct, frozen=True):
    """A time in ms, or a speedup: one time / another. The interval holds 90% of what may be true."""

    value: float
    low: float
    high: float
    basis: Basis = "measured"

    @classmethod
    def of(cls, found: Interval, basis: Basis = "measured") -> Number:
        return cls(found.median, found.low, found.high, basis)

    @property
    def side(self) -> Side:
        """Say on which side of 1 a speedup is: even within 3%, open if the interval allows another answer."""
        beyond = self.low < 1 - EVEN and self.high > 1 + EVEN
        if self.low <= 1 <= self.high and (abs(self.value - 1) >= EVEN or beyond):
            return "open"
        return "even" if abs(self.value - 1) < EVEN else "faster" if self.value > 1 else "slower"

    @property
    def is_wide(self) -> bool:
        """Return whether the size of a speedup is not sure, whatever its side."""
        return self.high >= WIDE * self.low

    def open_to_both(self) -> Number:
        """Widen a speedup until it holds 1: what disturbed the timing may have turned it."""
        return Number(self.value, min(self.low, 1 - 2 * EVEN), max(self.high, 1 + 2 * EVEN), self.basis)
