"""Charts of a page, and the same in words for people who cannot see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.step_difference import PART_NAMES, SHOWN_MS, Waterfall, signed
from fp8doctor.answer.verdict import Verdict
from fp8doctor.facts import Arm
from fp8doctor.render.timing import NONE_MS, Row, Timing, drawn_ms
from fp8doctor.render.words import NOT_PROFILED

BarKind = Literal["part", "whole", "cost", "saving"]


class Segment(Struct, frozen=True):
    """A piece of a bar."""

    name: str
    kind: BarKind
    number: int
    """Of the part among the columns of the table, which gives it its colour; 0 for the other kinds."""
    start_ms: float
    length_ms: float


class Bar(Struct, frozen=True):
    """A row of a chart."""

    label: str
    value: str
    """Text next to the bar."""
    words: str
    """The bar for who cannot see it."""
    segments: tuple[Segment, ...]


class Chart(Struct, frozen=True):
    """Bars over one axis."""

    title: str
    bars: tuple[Bar, ...]
    full_ms: float
    """Length of the axis."""
    legend: tuple[Segment, ...] = ()
    """One segment for each part that any bar shows."""


def steps(timing: Timing | None) -> Chart | None:
    """Draw the timed steps as bars of their parts.

    None if nothing was timed, or one step whose parts are unknown.
    """
    rows = [(row, row.arm.step_ms) for row in timing.rows if row.arm and row.arm.step_ms] if timing else []
    if timing is None or not (len(rows) > 1 or any(row.arm and drawn_ms(row.arm) for row, _ in rows)):
        return None
    bars = tuple(
        Bar(row.label, f"{row.step} ms", _in_words(row, segments), segments)
        for row, step_ms in rows
        if (segments := tuple(_segments(row, step_ms, timing.columns)))
    )
    drawn = {segment.name: segment for bar in bars for segment in bar.segments}
    names = (*timing.columns, NOT_PROFILED)
    return Chart(
        title="Milliseconds of one training step",
        bars=bars,
        full_ms=max(segment.start_ms + segment.length_ms for bar in bars for segment in bar.segments),
        legend=tuple(drawn[name] for name in names if name in drawn),
    )


def _segments(row: Row, step_ms: float, columns: Sequence[str]) -> Iterator[Segment]:
    times = drawn_ms(row.arm) if row.arm else ()
    if not times:
        yield Segment(NOT_PROFILED, "whole", 0, 0.0, step_ms)
        return
    start_ms = 0.0
    for number, (name, ms) in enumerate(zip(columns, times, strict=True)):
        if ms >= NONE_MS:
            yield Segment(name, "part", number, start_ms, ms)
            start_ms += ms


def _in_words(row: Row, segments: Sequence[Segment]) -> str:
    parts = ", ".join(
        f"{each.name} {each.length_ms:,.1f}" if each.kind == "part" else each.name for each in segments
    )
    return f"{row.label}: {row.step} ms ({parts})"


def differences(timing: Timing | None) -> tuple[Chart, ...]:
    """Draw each difference from BF16 as steps from the one time to the other."""
    return tuple(map(_difference, timing.waterfalls if timing else ()))


def _difference(found: Waterfall) -> Chart:
    parts = sorted(
        ((name, ms) for name, ms in found.parts_ms.items() if abs(ms) >= SHOWN_MS),
        key=lambda each: -abs(each[1]),
    )
    of_ms, against_ms = found.step_ms, found.step_ms - found.difference_ms
    bars = [_whole(found.against, against_ms)]
    end_ms = against_ms
    for name, ms in parts:
        start_ms, end_ms = end_ms, end_ms + ms
        kind: BarKind = "cost" if ms > 0 else "saving"
        label = PART_NAMES.get(name, name)
        segment = Segment(label, kind, 0, min(start_ms, end_ms), abs(ms))
        bars.append(Bar(label, signed(ms), f"{label} {signed(ms)} ms", (segment,)))
    bars.append(_whole(found.of, of_ms))
    return Chart(
        title=f"{found.of}, against {found.against}: {signed(found.difference_ms)} ms",
        bars=tuple(bars),
        full_ms=max(each.start_ms + each.length_ms for bar in bars for each in bar.segments),
    )


def _whole(label: str, ms: float) -> Bar:
    return Bar(label, f"{ms:,.1f}", f"{label} {ms:,.1f} ms", (Segment(label, "whole", 0, 0.0, ms),))


LEAST_PCT = 1.0
"""Least that the axis of the spread reaches to either side, in per cent of the median: a steady step is to
look steady."""


class Proof(Struct, frozen=True):
    """One timed step."""

    label: str
    median: str
    interval: str
    """That holds the true median with 90% confidence, in ms; empty if it is not known."""
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
    """Range of the axis on either side of a median."""
    speedup: str
    """The speedup and its interval; empty if none was measured."""


def evidence(timing: Timing | None, verdict: Verdict) -> Evidence | None:
    """Collect what the timed steps rest on; None if nothing was timed."""
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
    rounds = arm.get("rounds_ms", ())
    low, high = arm.get("low_ms"), arm.get("high_ms")
    ends: tuple[float, float] | None = (low, high) if low and high else None
    step_ms = arm.step_ms or 1.0
    return Proof(
        label=row.label,
        median=f"{step_ms:,.1f}",
        interval=f"{ends[0]:,.1f} to {ends[1]:,.1f}" if ends else "",
        rounds_pct=tuple(_from_median(ms, step_ms) for ms in rounds),
        interval_pct=(_from_median(ends[0], step_ms), _from_median(ends[1], step_ms)) if ends else None,
        words=_rounds_in_words(row.label, rounds),
        fp8_gemms=_count(arm, "fp8_gemms"),
        graphs=_count(arm, "graphs_run"),
        memory=row.memory,
    )


def _from_median(ms: float, median_ms: float) -> float:
    return 100 * (ms / median_ms - 1)


def _rounds_in_words(label: str, rounds: Sequence[float]) -> str:
    if not rounds:
        return f"{label}: no rounds were recorded"
    return f"{label}: {len(rounds)} rounds, {min(rounds):,.1f} to {max(rounds):,.1f} ms"


def _count(arm: Arm, name: str) -> str:
    count = arm.get(name)
    return "" if count is None else f"{count:,}"
