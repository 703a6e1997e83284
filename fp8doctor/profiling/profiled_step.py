"""Split a profiled step's GPU time by kernel family, with idle time.

Its work is kernels, or a CPU's operators. Each is linked to the operator that launched it, and a node of the
backward to its operator in the forward.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import Any

import msgspec

from fp8doctor.facts import Family, KernelGroup
from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, classify, is_fp8_gemm, own_work, work_inside
from fp8doctor.profiling.trace import LAUNCHES, Event, Thread, Trace, outer_first


class Operator(msgspec.Struct, gc=False, frozen=True):
    """An operator that launched work, and what is known of the work around it."""

    name: str | None = None
    types: tuple[str, ...] = ()
    inside: Family | None = None


def launching_operators(
    trace: Trace, activities: Sequence[Event], launches: Sequence[Event | None]
) -> list[Operator]:
    """Find each activity's innermost operator, by ``External id``, or by launch time without one.

    What is inside a node of the backward is inside its operator of the forward.
    """
    identities: list[int] = []
    without_id: dict[Thread, list[Event]] = defaultdict(list)
    for activity, launch in zip(activities, launches, strict=True):
        identity = activity.args.external
        if not identity and launch is not None:
            identity = -launch.args.correlation
            without_id[launch.tid].append(launch)
        identities.append(identity)
    found: dict[int, tuple[Operator, tuple[int, int] | None]] = {}
    """Identity -> operator, and the node around it, by its forward's thread and sequence number."""
    works: dict[Thread, dict[int, Family | None]] = defaultdict(dict)
    """Thread -> sequence number -> work of the forward; the last counts: making a node uses up a number."""
    threads: dict[int, Thread] = {}
    """``Fwd thread id`` -> thread, which operators of the forward lack."""
    wanted = set(identities)
    begins = {event.id: event.tid for event in trace.links if not event.bp}
    # thread and start of a backward node -> its forward operator's thread
    links = {(each.tid, each.ts): begins[each.id] for each in trace.links if each.bp and each.id in begins}
    for thread in {*trace.host, *without_id}:
        opened: list[tuple[float, Family | None, tuple[int, int] | None, Event | None]]
        opened = [(inf, None, None, None)]
        for event in sorted(trace.host.get(thread, []) + without_id.get(thread, []), key=outer_first):
            while opened[-1][0] <= event.ts:
                opened.pop()
            _, inside, node, operator = opened[-1]
            arguments = event.args
            if event.cat in LAUNCHES:
                if operator is not None:
                    launched_by = Operator(operator.name, operator.args.types, inside)
                    found[-arguments.correlation] = launched_by, node
                continue
            if event.cat == "cpu_op":
                sequence = arguments.sequence
                if sequence >= 0 and arguments.forward_thread:
                    node = (arguments.forward_thread, sequence)
                    if arguments.forward_thread not in threads and (thread, event.ts) in links:
                        threads[arguments.forward_thread] = links[thread, event.ts]
                elif sequence >= 0:
                    works[thread][sequence] = inside
                if arguments.external in wanted:
                    found[arguments.external] = Operator(event.name, arguments.types, inside), node
                inside, operator = work_inside(event.name) or inside, event
            elif event.name.startswith("Optimizer."):
                inside = "optimizer"
            opened.append((event.ts + event.dur, inside, node, operator))
    for identity, (each, node) in found.items():
        if each.inside is None and node is not None:
            among = [works[threads[node[0]]]] if node[0] in threads else works.values()
            served = [numbers[node[1]] for numbers in among if node[1] in numbers]
            if len(served) == 1:
                found[identity] = Operator(each.name, each.types, served[0]), node
    unknown = Operator(), None
    return [found.get(identity, unknown)[0] for identity in identities]


_RANKS: dict[Family, int] = {"communication": 1, "copy": 2}
"""Computing has rank 0."""


class Work(msgspec.Struct, gc=False):
    """A kernel, copy or fill, or an operator that computes on a CPU; times in ns."""

    start: int
    end: int
    rank: int
    """The lowest owns a shared time."""
    launched: float
    """Start of the launching call, -1 if unknown."""
    name: str
    family: Family
    operator: str | None
    own: int = 0
    """Its time that no other work owns."""


def work_of(trace: Trace) -> list[Work]:
    """Collect kernels, copies and fills; if the trace has none, the operators that compute on a CPU."""
    on_gpu = bool(trace.gpu)
    activities = sorted(
        trace.gpu if on_gpu else _computing_operators(trace), key=attrgetter("ts", "dur", "name")
    )
    launches = [trace.launches.get(event.args.correlation) for event in activities]
    operators = launching_operators(trace, activities, launches)
    keys = [
        (event.name, each.name, each.types, each.inside)
        for event, each in zip(activities, operators, strict=True)
    ]
    kinds = set(keys)
    fp8_step = any(
        FP8_GEMM_KERNEL.search(name) or (operator is not None and is_fp8_gemm(operator))
        for name, operator, _, _ in kinds
    )
    families = {key: classify(key[0] if on_gpu else "", *key[1:], fp8_step=fp8_step) for key in kinds}
    works = []
    for event, launch, key in zip(activities, launches, keys, strict=True):
        name, operator, family = *key[:2], families[key]
        start, launched = round(event.ts * 1e3), -1.0 if launch is None else launch.ts * 1e3
        end, rank = start + round(event.dur * 1e3), _RANKS.get(family, 0)
        works.append(Work(start, end, rank, launched, name, family, operator))
    return sorted(works, key=attrgetter("start", "end", "rank"))


def _computing_operators(trace: Trace) -> list[Event]:
    """List the operators that compute, each with all that a CPU does in its place, but its matmuls."""
    found: list[Event] = []
    for thread in trace.host.values():
        last = Event()
        for event in sorted(thread, key=outer_first):
            work = own_work(event.name) if event.cat == "cpu_op" else None
            if event.ts < last.ts + last.dur:
                if work not in ("gemm", "gemm_fp8") or is_fp8_gemm(last.name):
                    continue
                found.pop()
            if work is not None:
                found.append(event)
                last = event
    return found


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
    coming, running = deque(works), list[Work]()
    for now, then in pairwise(sorted({time for work in works for time in (work.start, work.end)})):
        while coming and coming[0].start <= now:
            running.append(coming.popleft())
        running = [work for work in running if work.end > now]
        min(running, key=attrgetter("rank")).own += then - now


def divided(works: Iterable[Work]) -> tuple[dict[Family, int], list[KernelGroup]]:
    """Sum up each family in ns, and the work of each name and family, the longest first."""
    families: dict[Family, int] = defaultdict(int)
    together: dict[tuple[str, Family], list[Work]] = defaultdict(list)
    for work in works:
        families[work.family] += work.own
        together[work.name, work.family].append(work)
    groups = [
        KernelGroup(
            name=name,
            family=family,
            operator=of[0].operator if len({each.operator for each in of}) == 1 else None,
            count=len(of),
            time_ms=sum(each.own for each in of) / 1e6,
        )
        for (name, family), of in together.items()
    ]
    return families, sorted(groups, key=lambda group: (-group.time_ms, group.name, group.family))


def longest_first(times: Mapping[Any, int]) -> dict[Any, float]:
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
    families, groups = divided(works)
    return ProfiledStep(
        families_ms=longest_first(families),
        busy_ms=sum(work.own for work in works) / 1e6,
        host_wait_pct=100 * waited / idle if idle and trace.gpu else None,
        kernels=len(works),
        groups=tuple(groups),
    )
