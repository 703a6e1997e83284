"""Where a profiled step goes: GPU time per family of kernels and per module, idle time and its cause."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fp8doctor.facts import Family, KernelGroup, ModuleTime
from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling.activities import cpu_activities, gpu_activities
from fp8doctor.profiling.operators import Modules, Place
from fp8doctor.profiling.profiled_step import by_module, grouped, milliseconds, sweep
from fp8doctor.profiling.trace import Trace, collector_paused


@dataclass(frozen=True)
class ProfiledStep:
    """One step, as the profiler saw it. The profiler slows the host down, so gaps between kernels are its
    own, not the step's."""

    families_ms: dict[Family, float]
    """Every instant at which the GPU worked has one owner, so they add up to ``busy_ms``."""
    busy_ms: float
    """Union of kernels, copies and fills over all streams; of operators on a CPU."""
    window_ms: float
    """From the first activity's begin to the last one's end."""
    host_wait_pct: float | None
    """Share of the gaps that ended with a kernel whose launch began after the GPU had run dry; None without
    gaps, and on a CPU."""
    kernels: int
    """Activities of the GPU; operators that compute on a CPU."""
    unclassified_ms: float
    """Of ``busy_ms``: kernels that no rule knows."""
    groups: tuple[KernelGroup, ...]
    """The longest first; a name that does two kinds of work has two. They add up to ``busy_ms``."""
    modules: tuple[ModuleTime, ...]
    """Modules with an annotation and work of their own, the longest first."""
    on_gpu: bool = True
    """False where the trace holds nothing of a GPU, so that a CPU's operators were split."""


@collector_paused()
def step_of(trace: Trace) -> ProfiledStep:
    """Split the step that the trace holds. Raises `fp8doctor.facts.record.UnreadableDocument` where it holds
    no activity, or lost the GPU's."""
    if trace.launches and not trace.gpu:
        raise UnreadableDocument(
            "the trace holds calls of the CUDA runtime and no kernels: the profiler did not see the GPU"
        )
    modules = Modules()
    works = gpu_activities(trace, modules) if trace.gpu else cpu_activities(trace, modules)
    if not works.spans:
        raise UnreadableDocument("the trace holds neither kernels nor operators")
    owned, gaps = sweep(works)
    idle = sum(end - start for start, end, _ in gaps)
    waited = sum(end - start for start, end, work in gaps if works.launched[work] > start)
    by_place: dict[Place, dict[Family, int]] = {}
    for kind, place, time in zip(works.kinds, works.places, owned, strict=True):
        kind.count += 1
        kind.time += time
        if place is not None:
            times = by_place.setdefault(place, {})
            times[kind.family] = times.get(kind.family, 0) + time
    groups = grouped(works.kinds)
    families: dict[Family, int] = defaultdict(int)
    for group in groups:
        families[group.family] += group.time
    return ProfiledStep(
        families_ms={
            family: milliseconds(time)
            for family, time in sorted(families.items(), key=lambda item: (-item[1], item[0]))
        },
        busy_ms=milliseconds(sum(owned)),
        window_ms=milliseconds(sum(owned) + idle),
        host_wait_pct=100 * waited / idle if idle and trace.gpu else None,
        kernels=len(works.kinds),
        unclassified_ms=milliseconds(families.get("unknown", 0)),
        groups=tuple(
            KernelGroup(
                name=each.name,
                family=each.family,
                operator=each.operator,
                count=each.count,
                time_ms=milliseconds(each.time),
            )
            for each in groups
        ),
        modules=by_module(by_place, modules),
        on_gpu=bool(trace.gpu),
    )
