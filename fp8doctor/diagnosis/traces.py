"""The conclusions from one or two traces of a user's profiler, as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8doctor.analysis.step_difference import Waterfall
from fp8doctor.analysis.traced import against, digits, unlike, what_comes_first, whether_fp8_ran, why_it_waits
from fp8doctor.diagnosis.document import SCHEMA_VERSION, Tool, tool
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.facts.traced import TracedStep
from fp8doctor.wording import capital


class Hint(Record, frozen=True, kw_only=True):
    """A part of the trace to look at, and the check that explains it; else an empty code."""

    code: str
    text: str


class Traces(Record, frozen=True, kw_only=True):
    """One trace, or two and their difference."""

    tool: Tool
    steps: tuple[TracedStep, ...]
    summaries: tuple[str, ...]
    """One for each trace: whether FP8 ran, and what the GPU waits for."""
    hints: tuple[tuple[Hint, ...], ...]
    """For each trace."""
    difference: Waterfall | None
    """The second less the first; None with one trace, or where they cannot be compared."""
    difference_summary: str
    """Empty without a difference."""
    unlike: tuple[str, ...]

    def to_json(self) -> str:
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "traces", **to_builtins(self)}
        return encode(data).decode()


def told(steps: Sequence[TracedStep]) -> Traces:
    """Conclude what one or two traces say."""
    found = against(steps[1], steps[0]) if len(steps) == 2 else None
    return Traces(
        tool=tool(),
        steps=tuple(steps),
        summaries=tuple(
            " ".join(filter(None, (whether_fp8_ran(step), why_it_waits(step)))) for step in steps
        ),
        hints=tuple(
            tuple(Hint(code=code, text=text) for code, text in what_comes_first(step)) for step in steps
        ),
        difference=found,
        difference_summary=_difference(found, *steps) if found else "",
        unlike=tuple(unlike(*steps)) if len(steps) == 2 else (),
    )


def _difference(found: Waterfall, first: TracedStep, second: TracedStep) -> str:
    """Tell by how much the second takes longer, and of which parts that is."""
    places = digits(min(first.step_ms, second.step_ms))
    each = " a step" if first.steps else ""
    ratio = f", {first.step_ms / second.step_ms:.2f}x of its speed" if second.step_ms and first.steps else ""
    parts = [
        f"{part} {'−' if ms < 0 else '+'}{abs(ms):,.{places}f}"
        for part, ms in sorted(found.parts_ms.items(), key=lambda item: -abs(item[1]))
        if abs(ms) >= 0.5 * 10**-places
    ]
    fused = (
        f" ({found.fused_ms:,.{places}f} ms of norm and pointwise work runs inside the casts and is not "
        "counted as theirs)"
        if found.fused_ms >= 0.5 * 10**-places
        else ""
    )
    change = abs(found.difference_ms)
    more = (
        f"{change:,.{places}f} ms {'longer' if found.difference_ms > 0 else 'shorter'}{ratio}"
        if change >= 0.5 * 10**-places
        else "no longer"
    )
    return (
        f"{capital(found.of)} takes {second.step_ms:,.{places}f} ms{each}, {found.against} "
        f"{first.step_ms:,.{places}f}: {more}. "
        + (f"Of that: {', '.join(parts)} ms{fused}." if parts else "No part differs.")
    )
