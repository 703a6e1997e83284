"""A trace that the user's own profiler wrote, told as what a step of it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.facts.traced import IdleCause, TracedKernel, TracedStep
from fp8doctor.profiling.activities import Works, gpu_activities
from fp8doctor.profiling.not_a_trace import read_or_explain
from fp8doctor.profiling.operators import Modules
from fp8doctor.profiling.profiled_step import Gap, grouped, milliseconds, sweep
from fp8doctor.profiling.step_marks import Host, Marks, Times, marks_of, span
from fp8doctor.profiling.trace import Event, Trace, collector_paused

Edges = list[int]
"""When the GPU was done with each step, and before them when it began with the first; in ns."""


@dataclass(frozen=True)
class Timeline:
    """The GPU's work, and which step launched it."""

    works: Works
    owned: list[int]
    gaps: list[Gap]
    step_of: list[int | None]
    edges: Edges


@collector_paused()
def traced_step(path: Path) -> TracedStep:
    """Read a trace. Raises `fp8doctor.facts.record.UnreadableDocument` with what was and was not seen."""
    trace = read_or_explain(path)
    device, gpus = _busiest_gpu(trace.gpu)
    its = [event for event in trace.gpu if event.dur > 0 and event.args.device in (device, UNNUMBERED)]
    if not its:
        raise UnreadableDocument("none of the GPU's work in it takes any time")
    trace = _with_earlier_launches(replace(trace, gpu=its))
    works = gpu_activities(trace, Modules())
    marks = marks_of(trace)
    step_of = _steps(works, marks)
    if not any(step is not None for step in step_of):
        marks, step_of = Marks(None, ()), [0] * len(works.spans)
    timeline = Timeline(works, *sweep(works), step_of, _edges(works, marks, step_of))
    worked = sorted({step for step in step_of if step is not None})
    compiled = Times(map(span, trace.compiling))
    calm = [step for step in worked if not compiled.within(*_on_the_host(step, marks, timeline))]
    counted = calm or worked
    length = [timeline.edges[step + 1] - timeline.edges[step] for step in counted]
    kernels = _kernels(timeline, counted)
    families: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        families[kernel.family] += kernel.time_ms
    idle = _idle(trace, timeline, counted)
    busy = sum(families.values())
    if not busy:
        raise UnreadableDocument("none of the GPU's work that its steps launched takes any time")
    return TracedStep(
        file=path.name,
        gpu=trace.gpus.get(device),
        gpus=gpus,
        rank=trace.rank,
        world_size=trace.world_size,
        steps=len(counted) if marks.by else 0,
        marked_by=marks.by,
        compiling_steps=len(worked) - len(calm),
        compiled=not calm,
        step_ms=busy + sum(idle.values()),
        low_ms=milliseconds(min(length)),
        high_ms=milliseconds(max(length)),
        busy_ms=busy,
        families_ms=dict(sorted(families.items(), key=lambda item: (-item[1], item[0]))),
        idle_ms=idle,
        outside_ms=milliseconds(
            sum(own for own, step in zip(timeline.owned, timeline.step_of, strict=True) if step is None)
        ),
        with_stack="python_function" in trace.categories,
        kernels=kernels,
    )


def _with_earlier_launches(trace: Trace) -> Trace:
    """Let work that was launched before the recording have a launch, at the begin of time.

    A GPU that runs behind the host still does work of steps before, whose calls were not recorded. Calls are
    numbered in order, so that its numbers lie below that of the first call.
    """
    first = min(trace.launches, default=0)
    earlier = {event.args.correlation: Event() for event in trace.gpu if 0 < event.args.correlation < first}
    return replace(trace, launches=earlier | trace.launches)


UNNUMBERED = -1
"""The GPU of an event that names none."""


def _busiest_gpu(events: Sequence[Event]) -> tuple[int, int]:
    """The number of the GPU that worked longest, and how many worked."""
    times = dict.fromkeys({event.args.device for event in events}, 0.0)
    if len(times) > 1:
        for event in events:
            times[event.args.device] += event.dur
    numbered = [device for device in times if device != UNNUMBERED] or [UNNUMBERED]
    return max(numbered, key=lambda device: times[device]), len(numbered)


def _steps(works: Works, marks: Marks) -> list[int | None]:
    """Number the step that launched each work; where no launch is known, the one during which it began."""
    if marks.by is None:
        return [0] * len(works.spans)
    return [
        marks.step_at(round(launched) if launched >= 0 else start)
        for launched, (start, _, _, _) in zip(works.launched, works.spans, strict=True)
    ]


def _on_the_host(step: int, marks: Marks, timeline: Timeline) -> tuple[int, int]:
    return marks.steps[step] if marks.by else (timeline.edges[0], timeline.edges[1])


def _edges(works: Works, marks: Marks, step_of: Sequence[int | None]) -> Edges:
    """A step begins where the host began with it, or the GPU was done with what was before it."""
    first, last = works.spans[0][0], max(end for _, end, _, _ in works.spans)
    if marks.by is None:
        return [first, last]
    done = [0] * len(marks.steps)
    before = 0
    for launched, (start, end, _, _), step in zip(works.launched, works.spans, step_of, strict=True):
        if step is not None:
            done[step] = max(done[step], end)
        elif (launched if launched >= 0 else start) < marks.steps[0][0]:
            before = max(before, end)
    begin = marks.steps[0][0] if marks.by == "profiler" else first
    edges = [max(begin, before)]
    for number, (_, end) in enumerate(marks.steps):
        following = marks.steps[number + 1][0] if number + 1 < len(marks.steps) else end
        edges.append(max(edges[-1], following, done[number]))
    return edges


def _kernels(timeline: Timeline, counted: Sequence[int]) -> tuple[TracedKernel, ...]:
    """What the counted steps launched, by name and family, a step."""
    wanted = set(counted)
    for kind, own, step in zip(timeline.works.kinds, timeline.owned, timeline.step_of, strict=True):
        if step in wanted:
            kind.count += 1
            kind.time += own
    return tuple(
        TracedKernel(
            name=kind.name,
            family=kind.family,
            operator=kind.operator,
            count=kind.count / len(counted),
            time_ms=milliseconds(kind.time) / len(counted),
        )
        for kind in grouped(timeline.works.kinds)
        if kind.count
    )


def _idle(trace: Trace, timeline: Timeline, counted: Sequence[int]) -> dict[str, float]:
    """Idle time of the counted steps by its cause, a step."""
    host, causes = Host(trace), defaultdict[IdleCause, int](int)
    launched, kinds = timeline.works.launched, timeline.works.kinds
    windows = Times((timeline.edges[step], timeline.edges[step + 1]) for step in counted)
    for dry, end, work in _gaps(timeline):
        launch = end if work is None else launched[work]
        if 0 <= launch <= dry:
            causes["in_time"] += windows.within(dry, end)
            continue
        copies = work is not None and kinds[work].name.startswith(_BETWEEN_HOST_AND_GPU)
        for part in windows.parts(dry, end):
            for cause, time in host.divide(part, dry, round(launch), copies=copies).items():
                causes[cause] += time
    return {
        cause: milliseconds(time) / len(counted)
        for cause, time in sorted(causes.items(), key=lambda item: (-item[1], item[0]))
        if time
    }


_BETWEEN_HOST_AND_GPU = ("Memcpy HtoD", "Memcpy DtoH")


def _gaps(timeline: Timeline) -> Iterator[tuple[int, int, int | None]]:
    """Begin and end of each gap and the work that ended it, None for the end of the last step."""
    works, edges = timeline.works, timeline.edges
    begin, last = works.spans[0][0], max(end for _, end, _, _ in works.spans)
    if edges[0] < begin:
        yield edges[0], begin, works.spans[0][3]
    yield from timeline.gaps
    if last < edges[-1]:
        yield last, edges[-1], None
