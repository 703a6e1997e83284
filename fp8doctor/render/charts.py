"""What the charts of a page show: bars in milliseconds, and the same in words for who cannot see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.step_difference import SHOWN_MS, Waterfall, signed
from fp8doctor.render.timing import NONE_MS, Row, Timing, drawn_ms
from fp8doctor.render.words import NOT_PROFILED, PARTS

Kind = Literal["part", "whole", "cost", "saving"]


class Segment(Struct, frozen=True):
    """A piece of a bar."""

    name: str
    kind: Kind
    number: int
    """Of the part among the columns of the table, which gives it its colour; 0 for the other kinds."""
    start_ms: float
    length_ms: float


class Bar(Struct, frozen=True):
    """A row of a chart."""

    label: str
    value: str
    """What stands beside the bar."""
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
    """Draw the timed steps, each as a bar of its parts; None where nothing was timed, or one step whose parts
    are not known."""
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
        kind: Kind = "cost" if ms > 0 else "saving"
        label = PARTS.get(name, name)
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
