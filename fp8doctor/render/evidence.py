"""How far the times of a trial spread, and the proof that each step ran what its name says."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.facts import Arm, recorded
from fp8doctor.render.timing import Row, Timing

LEAST_PCT = 1.0
"""Least that the axis of the spread reaches to either side, in per cent of the median: a steady step is to
look steady."""


class Proof(Struct, frozen=True):
    """One timed step."""

    label: str
    median: str
    interval: str
    """That holds the true median with 90 % confidence, in ms; empty where it is not known."""
    rounds_pct: tuple[float, ...]
    """Its rounds around its median, in per cent of it."""
    interval_pct: tuple[float, float] | None
    words: str
    """The rounds for who cannot see them."""
    fp8_gemms: str
    graphs: str
    memory: str
    """Peak in GiB."""


class Evidence(Struct, frozen=True):
    """All timed steps, over one axis."""

    proofs: tuple[Proof, ...]
    reach_pct: float
    """How far the axis reaches to either side of a median."""
    speedup: str
    """The speedup and its interval; empty where none was measured."""


def evidence(timing: Timing | None, verdict: Verdict) -> Evidence | None:
    """Collect what the timed steps rest on; None where nothing was timed."""
    proofs = tuple(_proof(row, row.arm) for row in (timing.rows if timing else ()) if row.arm)
    if not proofs:
        return None
    farthest = (abs(each) for proof in proofs for each in (*proof.rounds_pct, *(proof.interval_pct or ())))
    return Evidence(proofs, max(LEAST_PCT, *farthest), _speedup(verdict))


def _speedup(verdict: Verdict) -> str:
    """Write the quotient of the two times and the interval that the rounds allow it."""
    low, high = verdict.speedup_low, verdict.speedup_high
    if low is None or high is None:
        return ""
    quotient = f": {verdict.speedup:.2f}" if verdict.speedup is not None else ""
    return (
        f"BF16's time divided by FP8's{quotient}. Over the rounds it lies between {low:.2f} and {high:.2f} "
        "(90% confidence)."
    )


def _proof(row: Row, arm: Arm) -> Proof:
    rounds = arm.rounds_ms if recorded(arm, "rounds_ms") else ()
    known = recorded(arm, "low_ms") and recorded(arm, "high_ms")
    ends = (arm.low_ms, arm.high_ms) if known and arm.low_ms and arm.high_ms else None
    step_ms = arm.step_ms or 1.0
    return Proof(
        label=row.label,
        median=f"{step_ms:,.1f}",
        interval=f"{ends[0]:,.1f} to {ends[1]:,.1f}" if ends else "",
        rounds_pct=tuple(_from_median(ms, step_ms) for ms in rounds),
        interval_pct=(_from_median(ends[0], step_ms), _from_median(ends[1], step_ms)) if ends else None,
        words=_in_words(row.label, rounds),
        fp8_gemms=_count(arm, "fp8_gemms"),
        graphs=_count(arm, "graphs_run"),
        memory=row.memory,
    )


def _from_median(ms: float, median_ms: float) -> float:
    return 100 * (ms / median_ms - 1)


def _in_words(label: str, rounds: Sequence[float]) -> str:
    if not rounds:
        return f"{label}: no rounds were recorded"
    return f"{label}: {len(rounds)} rounds, {min(rounds):,.1f} to {max(rounds):,.1f} ms"


def _count(arm: Arm, name: str) -> str:
    count = getattr(arm, name) if recorded(arm, name) else None
    return "" if count is None else f"{count:,}"
