"""Who owns each instant of a step, and the time that kinds of work and modules own together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from fp8doctor.facts import Family, ModuleTime
from fp8doctor.profiling.activities import Kind, Span, Works
from fp8doctor.profiling.operators import Modules, Place

Gap = tuple[int, int, int]
"""Start and end in ns, and the work that ended it."""


def sweep(works: Works) -> tuple[list[int], list[Gap]]:
    """Give each instant to one work. Returns what each owns, and the gaps.

    Of several works at one time the lowest rank owns it, then the one that began first.
    """
    spans = sorted(works.spans)
    following = [*[start for start, _, _, _ in spans[1:]], inf]
    owned, busy_until = [0] * len(works.kinds), spans[0][0]
    gaps: list[Gap] = []
    together: list[Span] = []
    for span, next_start in zip(spans, following, strict=True):
        start, end, _, work = span
        if start >= busy_until:
            if start > busy_until:
                gaps.append((busy_until, start, work))
            if end <= next_start:
                owned[work] += end - start
                busy_until = end
                continue
        together.append(span)
        busy_until = max(busy_until, end)
        if busy_until <= next_start:
            _share(together, owned)
            together = []
    return owned, gaps


def _share(spans: Sequence[Span], owned: list[int]) -> None:
    """Divide a stretch without gaps among spans that overlap, which are in order of their start."""
    times = sorted({time for start, end, _, _ in spans for time in (start, end)})
    running: list[tuple[int, int, int, int]] = []
    coming = 0
    for now, then in pairwise(times):
        while coming < len(spans) and spans[coming][0] <= now:
            start, end, rank, work = spans[coming]
            heappush(running, (rank, start, end, work))
            coming += 1
        while running[0][2] <= now:
            heappop(running)
        owned[running[0][3]] += then - now


def grouped(kinds: Iterable[Kind]) -> list[Kind]:
    """Merge kinds of one name and family, the longest first; several operators leave none."""
    groups: dict[tuple[str, Family], Kind] = {}
    for kind in {id(each): each for each in kinds}.values():
        group = groups.setdefault((kind.name, kind.family), Kind(kind.name, kind.family, kind.operator))
        group.count += kind.count
        group.time += kind.time
        if group.operator != kind.operator:
            group.operator = None
    return sorted(groups.values(), key=lambda group: (-group.time, group.name, group.family))


def by_module(by_place: dict[Place, dict[Family, int]], modules: Modules) -> tuple[ModuleTime, ...]:
    times: dict[int, dict[Family, int]] = defaultdict(lambda: defaultdict(int))
    for place, families in by_place.items():
        owner = modules.owner(place)
        if owner is not None:
            for family, time in families.items():
                times[owner][family] += time
    ordered = sorted(times.items(), key=lambda item: (-sum(item[1].values()), modules.names[item[0]]))
    return tuple(
        ModuleTime(
            kind=modules.names[owner][0],
            name=modules.names[owner][1],
            families_ms={family: milliseconds(time) for family, time in families.items() if time},
        )
        for owner, families in ordered
        if any(families.values())
    )


def milliseconds(nanoseconds: int) -> float:
    return nanoseconds / 1e6
