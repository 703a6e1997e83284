"""Why the GPU had nothing to do: each gap, divided by what the host did until the launch that ended it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator

from fp8doctor.facts.traced import IdleCause
from fp8doctor.profiling.step_marks import Times, span
from fp8doctor.profiling.trace import Event, Trace

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
