"""Where the steps of a user's trace begin and end on the host."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Literal

from fp8doctor.profiling.trace import Event, Trace

PROFILER_STEP = "ProfilerStep#"
"""``torch.profiler.profile.step`` ends one and begins the next."""

OPTIMIZER_STEP = "Optimizer.step#"
"""Around every step of an optimizer of torch, whoever profiles."""


class Times:
    """Stretches of time in ns, without those that overlap, in order."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        for start, end in sorted(spans):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut them to what lies between two times."""
        for each in range(bisect_right(self.ends, start), bisect_left(self.starts, end)):
            yield max(start, self.starts[each]), min(end, self.ends[each])

    def within(self, start: int, end: int) -> int:
        """Tell how much of them lies between two times."""
        return sum(until - begin for begin, until in self.parts(start, end)) if self.starts else 0


def span(event: Event) -> tuple[int, int]:
    """Begin and end in ns."""
    start = round(event.ts * 1e3)
    return start, start + round(event.dur * 1e3)


@dataclass(frozen=True)
class Marks:
    """Steps in order, begin and end of each on the host in ns."""

    by: Literal["profiler", "optimizer"] | None
    steps: tuple[tuple[int, int], ...]

    def step_at(self, time: int) -> int | None:
        """Number the step in which a time lies; None where it lies in none."""
        number = bisect_right(self.steps, time, key=itemgetter(0)) - 1
        return number if number >= 0 and time < self.steps[number][1] else None


def marks_of(trace: Trace) -> Marks:
    """Find the profiler's own steps, else those that the optimizer's ends make of at least two."""
    profiler = sorted(map(span, _annotated(trace, PROFILER_STEP)))
    if profiler:
        return Marks("profiler", tuple(profiler))
    ends = sorted(end for _, end in _outermost(map(span, _annotated(trace, OPTIMIZER_STEP))))
    if len(ends) < 2:
        return Marks(None, ())
    begin = round(min(event.ts for event in chain.from_iterable(trace.host.values())) * 1e3)
    return Marks("optimizer", tuple(pairwise((begin, *ends))))


def _annotated(trace: Trace, prefix: str) -> Iterator[Event]:
    return (event for event in trace.annotations if event.name.startswith(prefix))


def _outermost(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    until = -1
    for start, end in sorted(spans):
        if end > until:
            yield start, end
            until = end
