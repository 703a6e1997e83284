"""The verdict: what a report answers first."""

from __future__ import annotations

from typing import Literal

from fp8doctor.finding import Basis
from fp8doctor.record import Record

Status = Literal["fp8_not_engaged", "no_fp8", "not_measured", "fp8_slower", "fp8_even", "fp8_faster"]


class Verdict(Record, frozen=True, kw_only=True):
    """The answer in one record. ``speedup`` is best BF16 / as it is; what was not measured is None."""

    status: Status
    summary: str
    """One to three sentences."""
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    basis: Basis | None = None
    achievable_speedup: float | None = None
    step_ms: float | None = None
    bf16_step_ms: float | None = None
    tokens_per_s: float | None = None
