"""Find the steps in a user's trace, and why the GPU was idle in them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Literal

from fp8doctor.facts.traced import IdleCause
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


_DATA_LOADER = "enumerate(DataLoader)#"
"""Begins the name of the annotation around the fetching of a batch by torch's DataLoader."""

_SYNCHRONIZES = re.compile(r"^(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize")
_COPIES = re.compile(r"^(cuda|hip|cu)Memcpy")

_ONLY_LAUNCH = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"})
"""Nearly all calls, which are neither."""

NESTED_WAITS = 4
"""Waits of several threads that may lie within each other."""


class Host:
    """What the host did, as far as it explains why the GPU had nothing to do."""

    def __init__(self, trace: Trace) -> None:
        calls = [event for event in trace.launches.values() if event.name not in _ONLY_LAUNCH]
        loading = (event for event in trace.annotations if event.name.startswith(_DATA_LOADER))
        self.occupied: tuple[tuple[IdleCause, Times], ...] = (
            ("compilation", Times(map(span, trace.compiling))),
            ("data_loader", Times(map(span, loading))),
            ("host_copy", Times(map(span, _matching(calls, _COPIES)))),
        )
        self.waits = sorted(map(span, _matching(calls, _SYNCHRONIZES)))

    def divide(
        self, part: tuple[int, int], dry: int, launch: int, *, copies: bool = False
    ) -> dict[IdleCause, int]:
        """Divide a part of a gap that began at ``dry``, after which what ended it was launched, -1 where that
        is not known; ``copies`` says whether that was a copy to or from the host."""
        start, end = part
        if launch < 0:
            return {"unknown": end - start}
        launched = max(start, min(launch, end))
        left, causes = end - start, defaultdict[IdleCause, int](int)
        if copies:
            causes["host_copy"] = end - launched
            left -= end - launched
        for cause, times in self.occupied:
            own = min(left, times.within(start, launched))
            causes[cause] += own
            left -= own
        causes["synchronization" if self._waited_at(dry) else "late_launch"] += left
        return causes

    def _waited_at(self, time: int) -> bool:
        """Whether the host waited for the GPU when that ran dry, so that nothing more was launched."""
        before = bisect_right(self.waits, time, key=lambda wait: wait[0])
        return any(end >= time for _, end in self.waits[max(0, before - NESTED_WAITS) : before])


def _matching(calls: Iterable[Event], pattern: re.Pattern[str]) -> Iterator[Event]:
    return (event for event in calls if pattern.match(event.name))
