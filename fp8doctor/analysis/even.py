"""What a ratio of two times tells: faster, even, slower, or nothing."""

from __future__ import annotations

from fp8doctor.analysis.median_interval import Interval

EVEN = 0.03
"""A speedup within this of 1 is called even. A convention of this tool."""


def side(speedup: float) -> int:
    """Tell faster, 1, from even, 0, and slower, -1."""
    return 0 if abs(speedup - 1) < EVEN else 1 if speedup > 1 else -1


def swallows_effect(speedup: Interval) -> bool:
    """Whether the interval holds 1 although its median, or both its ends, lie beyond what is called even."""
    apart = abs(speedup.median - 1) >= EVEN
    return speedup.low <= 1 <= speedup.high and (
        apart or (speedup.low < 1 - EVEN and speedup.high > 1 + EVEN)
    )


def is_decided(speedup: Interval) -> bool:
    """Whether the interval leaves 1, or is within what is called even, so that more rounds tell no more."""
    return not speedup.low <= 1 <= speedup.high or (speedup.low >= 1 - EVEN and speedup.high <= 1 + EVEN)
