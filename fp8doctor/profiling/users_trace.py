"""Read the user's own trace: steps, kernels, and why the GPU was idle."""

import re
import stat
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Literal

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.facts.trial import IdleCause, TracedKernel, TracedStep
from fp8doctor.profiling.profiled_step import Gap, Work, divided, longest_first, sweep, work_of
from fp8doctor.profiling.trace import Event, Trace, outer_first, read_trace

UNNUMBERED = -1
"""GPU of an event without a number."""


class Times:
    """Disjoint stretches of time in ns, in order."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        for start, end in sorted(spans):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def within(self, start: int, end: int) -> int:
        inside = range(bisect_right(self.ends, start), bisect_left(self.starts, end))
        return sum(min(end, self.ends[each]) - max(start, self.starts[each]) for each in inside)


Marked = Literal["profiler", "optimizer"] | None
"""Who marked the steps."""

Steps = list[tuple[int, int]]
"""In order, begin and end of each on the host in ns."""


def traced_step(path: Path) -> TracedStep:
    """Read a trace with work of a GPU.

    Raises `fp8doctor.facts.record.UnreadableDocument`; OSError if the file cannot be read.
    """
    trace, gpu, gpus = _of_one_gpu(_trace_with_kernels(path))
    works = work_of(trace)
    marked_by, steps, at = _placed(works, trace)
    edges = _edges(works, marked_by, steps, at)
    worked = sorted({step for step in at if step is not None})
    events = chain.from_iterable(trace.host.values())
    compiled = Times(span(event) for event in events if event.name.endswith(_COMPILING))
    calm = [
        step for step in worked if not compiled.within(*(steps[step] if marked_by else (edges[0], edges[1])))
    ]
    counted = calm or worked
    length = [edges[step + 1] - edges[step] for step in counted]
    wanted, of, gaps = set(counted), len(counted), sweep(works)  # which also counts each work's own time
    families, kernels = divided(work for work, step in zip(works, at, strict=True) if step in wanted)
    windows = Times((edges[step], edges[step + 1]) for step in counted)
    idle = _idle(trace, compiled, works, gaps, windows)
    if not any(families.values()):
        raise UnreadableDocument("none of the GPU's work that its steps launched takes any time")
    return TracedStep(
        file=path.name,
        gpu=trace.gpus.get(gpu),
        gpus=gpus,
        rank=trace.rank,
        world_size=trace.world_size,
        steps=of if marked_by else 0,
        marked_by=marked_by,
        compiling_steps=len(worked) - len(calm),
        compiled=not calm,
        step_ms=(sum(families.values()) + sum(idle.values())) / 1e6 / of,
        low_ms=min(length) / 1e6,
        high_ms=max(length) / 1e6,
        busy_ms=sum(families.values()) / 1e6 / of,
        families_ms={name: time / of for name, time in longest_first(families).items()},
        idle_ms={cause: time / of for cause, time in longest_first(idle).items() if time},
        outside_ms=sum(work.own for work, step in zip(works, at, strict=True) if step is None) / 1e6,
        with_stack=trace.with_stack,
        kernels=tuple(
            TracedKernel(
                name=each.name,
                family=each.family,
                operator=each.operator,
                count=each.count / of,
                time_ms=each.time_ms / of,
            )
            for each in kernels
        ),
    )


def _trace_with_kernels(path: Path) -> Trace:
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableDocument("it is not a file; name a trace (.json or .json.gz)")
    trace = read_trace(path)
    if trace.gpu:
        return trace
    raise UnreadableDocument(
        "it holds calls of the CUDA runtime and no kernel: the profiler did not see the GPU (CUPTI could not "
        "be used, or another profiler had it)"
        if trace.launches
        else "it holds no work of a GPU; record it on the GPU with "
        "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
    )


def _of_one_gpu(trace: Trace) -> tuple[Trace, int, int]:
    """Keep the work of the GPU with the most; return also its number, and how many GPUs worked.

    A GPU behind the host still works on what was launched before the recording. Calls are numbered in order,
    so those have numbers below the first recorded one: their launches are at time zero.
    """
    took = defaultdict[int, float](float)
    for event in trace.gpu:
        took[event.args.device] += event.dur
    numbered = [device for device in took if device != UNNUMBERED] or [UNNUMBERED]
    gpu = max(numbered, key=lambda each: took[each])
    its = [event for event in trace.gpu if event.dur > 0 and event.args.device in (gpu, UNNUMBERED)]
    if not its:
        raise UnreadableDocument("none of the GPU's work in it takes any time")
    first = min(trace.launches, default=0)
    earlier = {event.args.correlation: Event() for event in its if 0 < event.args.correlation < first}
    return replace(trace, gpu=its, launches=earlier | trace.launches), gpu, len(numbered)


def _placed(works: Sequence[Work], trace: Trace) -> tuple[Marked, Steps, list[int | None]]:
    """Find the marked steps, and the step that launched each work; without marks one step has all of it."""
    marked_by, steps = marks_of(trace)
    at: list[int | None] = []
    for work in works:
        number = bisect_right(steps, begun(work), key=itemgetter(0)) - 1
        at.append(number if number >= 0 and begun(work) < steps[number][1] else None)
    if all(step is None for step in at):
        return None, [(-1, max(work.end for work in works))], [0] * len(works)
    return marked_by, steps, at


def begun(work: Work) -> int:
    """Return when work was launched, or began if that is unknown."""
    return round(work.launched) if work.launched >= 0 else work.start


def _edges(works: Sequence[Work], marked_by: Marked, steps: Steps, at: Sequence[int | None]) -> list[int]:
    """Return when the GPU began the first step, and when it finished each, in ns.

    A step begins when the host began and the GPU was free. Without the profiler's marks the first begins with
    the GPU's work.
    """
    done, before = [0] * len(steps), 0
    for work, step in zip(works, at, strict=True):
        if step is not None:
            done[step] = max(done[step], work.end)
        elif begun(work) < steps[0][0]:
            before = max(before, work.end)
    edges = [max(steps[0][0] if marked_by == "profiler" else works[0].start, before)]
    following = [*(begin for begin, _ in steps[1:]), steps[-1][1]]
    for then, end in zip(following, done, strict=True):
        edges.append(max(edges[-1], then, end))
    return edges


def _idle(
    trace: Trace, compiled: Times, works: Sequence[Work], gaps: Sequence[Gap], windows: Times
) -> dict[IdleCause, int]:
    """Return the idle time in these windows by what kept the host for most of a gap."""
    calls = [event for event in trace.launches.values() if event.name not in _ONLY_LAUNCH]
    loading = (event for event in trace.annotations if event.name.startswith(_DATA_LOADER))
    occupied: dict[IdleCause, Times] = {
        "compilation": compiled,
        "data_loader": Times(map(span, loading)),
        "host_copy": Times(span(event) for event in calls if _COPIES.match(event.name)),
    }
    waits = Times(span(event) for event in calls if _SYNCHRONIZES.match(event.name))

    def cause(dry: int, end: int, launch: int) -> IdleCause:
        """Name it until the host launched what ended the gap; -1 if unknown."""
        if launch < 0:
            return "unknown"
        if launch <= dry:
            return "in_time"
        launched = min(launch, end)
        took = {cause: times.within(dry, launched) for cause, times in occupied.items()}
        longest = max(took, key=lambda cause: took[cause])
        if 2 * took[longest] > launched - dry:
            return longest
        return "synchronization" if waits.within(dry - 1, dry + 1) else "late_launch"

    causes, first, last = defaultdict[IdleCause, int](int), works[0], max(work.end for work in works)
    for dry, end, work in (*gaps, (min(windows.starts), first.start, first)):
        if dry < end:
            causes[cause(dry, end, round(work.launched))] += windows.within(dry, end)
    if last < (end := max(windows.ends)):  # nothing of the step ended it
        causes[cause(last, end, end)] += windows.within(last, end)
    return causes


PROFILER_STEP = "ProfilerStep#"
"""Annotation of ``torch.profiler.profile.step``."""

OPTIMIZER_STEP = "Optimizer.step#"
"""Annotation around every step of torch's optimizers."""


def span(event: Event) -> tuple[int, int]:
    start = round(event.ts * 1e3)
    return start, start + round(event.dur * 1e3)


def marks_of(trace: Trace) -> tuple[Marked, Steps]:
    """Find the profiler's steps, else those of the most frequent optimizer."""
    profiler = sorted(span(event) for event in trace.annotations if event.name.startswith(PROFILER_STEP))
    if profiler:
        return "profiler", profiler
    ends: dict[str, list[int]] = defaultdict(list)
    until = -1
    for event in sorted(trace.annotations, key=outer_first):
        _, end = span(event)
        if event.name.startswith(OPTIMIZER_STEP) and end > until:  # of those in each other the outermost
            ends[event.name].append(end)
            until = end
    steps = max(ends.values(), key=lambda each: (len(each), each), default=[])
    if len(steps) < 2:
        return None, []
    begin = round(min(event.ts for event in chain.from_iterable(trace.host.values())) * 1e3)
    return "optimizer", list(pairwise((begin, *steps)))


_COMPILING = "(dynamo_timed)"
"""Suffix of torch.compile's events, since torch 2.4."""

_DATA_LOADER = "enumerate(DataLoader)#"
"""Prefix of the annotation around a DataLoader's fetching of a batch."""

_SYNCHRONIZES = re.compile(r"^(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize")
_COPIES = re.compile(r"^(cuda|hip|cu)Memcpy")

_ONLY_LAUNCH = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"})
"""Nearly all calls: neither synchronize nor copy."""
