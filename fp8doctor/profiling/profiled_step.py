"""Split a profiled step's GPU time by kernel family, with idle time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeVar

from fp8doctor.facts import Family, KernelGroup
from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling.activities import Work, WorkKind, work_of
from fp8doctor.profiling.trace import Trace, collector_paused

Name = TypeVar("Name", bound=str)

Gap = tuple[int, int, Work]
"""Start and end in ns, and the work that ended it."""


def sweep(works: Sequence[Work]) -> list[Gap]:
    """Give each instant to the work of the lowest rank, then to the first; return the gaps."""
    busy_until = works[0].start
    gaps: list[Gap] = []
    together: list[Work] = []
    for work, following in zip(works, (*works[1:], None), strict=True):
        if work.start > busy_until:
            gaps.append((busy_until, work.start, work))
        together.append(work)
        busy_until = max(busy_until, work.end)
        if following is None or busy_until <= following.start:
            _share(together)
            together = []
    return gaps


def _share(works: Sequence[Work]) -> None:
    if len(works) == 1:
        works[0].own = works[0].end - works[0].start
        return
    times = sorted({time for work in works for time in (work.start, work.end)})
    running: list[tuple[int, int]] = []
    coming = 0
    for now, then in pairwise(times):
        while coming < len(works) and works[coming].start <= now:
            heappush(running, (works[coming].rank, coming))
            coming += 1
        while works[running[0][1]].end <= now:
            heappop(running)
        works[running[0][1]].own += then - now


def grouped(kinds: Iterable[WorkKind]) -> list[WorkKind]:
    groups: dict[tuple[str, Family], WorkKind] = {}
    for kind in {id(each): each for each in kinds}.values():
        group = groups.setdefault((kind.name, kind.family), WorkKind(kind.name, kind.family, kind.operator))
        group.count += kind.count
        group.time += kind.time
        if group.operator != kind.operator:
            group.operator = None
    return sorted(groups.values(), key=lambda group: (-group.time, group.name, group.family))


def longest_first(times: Mapping[Name, int]) -> dict[Name, float]:
    """Turn times in ns into ms."""
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return {name: time / 1e6 for name, time in ordered}


@dataclass(frozen=True)
class ProfiledStep:
    """A step in the profiler's view, which slows the host: gaps are the profiler's."""

    families_ms: dict[Family, float]
    """Adds up to ``busy_ms``: each busy instant has one owner."""
    busy_ms: float
    """Union of kernels, copies and fills over all streams, or of CPU operators."""
    host_wait_pct: float | None
    """Share of idle time that ended with a late launch; None without gaps, and on a CPU."""
    kernels: int
    """GPU activities, or computing CPU operators."""
    groups: tuple[KernelGroup, ...]
    """Longest first; a name with two kinds of work has two. They add up to ``busy_ms``."""


@collector_paused()
def step_of(trace: Trace, *, on_gpu: bool = False) -> ProfiledStep:
    """Split the trace's step.

    Raises `fp8doctor.facts.record.UnreadableDocument` without activities, or without a GPU's if it ran
    ``on_gpu`` or launched some.
    """
    if (on_gpu or trace.launches) and not trace.gpu:
        raise UnreadableDocument("the trace holds no kernels: the profiler saw nothing of the GPU")
    works = work_of(trace)
    if not works:
        raise UnreadableDocument("the trace holds neither kernels nor operators")
    gaps = sweep(works)
    idle = sum(end - start for start, end, _ in gaps)
    waited = sum(end - start for start, end, work in gaps if work.launched > start)
    for work in works:
        work.kind.count += 1
        work.kind.time += work.own
    groups = grouped(work.kind for work in works)
    families: dict[Family, int] = defaultdict(int)
    for group in groups:
        families[group.family] += group.time
    return ProfiledStep(
        families_ms=longest_first(families),
        busy_ms=sum(work.own for work in works) / 1e6,
        host_wait_pct=100 * waited / idle if idle and trace.gpu else None,
        kernels=len(works),
        groups=tuple(
            KernelGroup(
                name=each.name,
                family=each.family,
                operator=each.operator,
                count=each.count,
                time_ms=each.time / 1e6,
            )
            for each in groups
        ),
    )
