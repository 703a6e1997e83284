"""Where the steps of a user's trace begin and end on the host."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Literal

from fp8doctor.profiling.trace import Event, Trace, outer_first

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
        first, after = bisect_right(self.ends, start), bisect_left(self.starts, end)
        if after - first == 1:  # nearly always
            return min(end, self.ends[first]) - max(start, self.starts[first])
        return sum(until - begin for begin, until in self.parts(start, end))


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
    """Find the profiler's own steps, else those between the ends of an optimizer's, where it has two.

    Of optimizers of several classes the one that steps most often tells, else the one that steps last.
    """
    profiler = sorted(map(span, _annotated(trace, PROFILER_STEP)))
    if profiler:
        return Marks("profiler", tuple(profiler))
    by_name: dict[str, list[int]] = defaultdict(list)
    for name, end in _outermost(_annotated(trace, OPTIMIZER_STEP)):
        by_name[name].append(end)
    ends = max(by_name.values(), key=lambda ends: (len(ends), ends), default=[])
    if len(ends) < 2:
        return Marks(None, ())
    begin = round(min(event.ts for event in chain.from_iterable(trace.host.values())) * 1e3)
    return Marks("optimizer", tuple(pairwise((begin, *ends))))


def _annotated(trace: Trace, prefix: str) -> Iterator[Event]:
    return (event for event in trace.annotations if event.name.startswith(prefix))


def _outermost(events: Iterable[Event]) -> Iterator[tuple[str, int]]:
    """Name and end of those that lie in no other, in order."""
    until = -1
    for event in sorted(events, key=outer_first):
        _, end = span(event)
        if end > until:
            yield event.name, end
            until = end
