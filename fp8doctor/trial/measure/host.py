"""The host while arms are timed: who else used its cores, and what was taken from this process.

Linux counts all of it since the start of the machine, so that it is read at both ends of a window. Once a
visit a fixed piece of Python is timed, beside the GPU's work: the host's own self-check.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fp8doctor.facts import HostLoad
from fp8doctor.facts.unrecorded import NOT_RECORDED

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

PACE_LOOPS = 5000
"""Rounds of the fixed piece of Python: about 0.3 ms, so that it ends before most steps do."""


@dataclass(frozen=True)
class Counters:
    """What Linux has counted so far; None where it does not tell."""

    clock_s: float
    total: float
    """Time of the cores that this process may use, in ticks of `os.sysconf`, as all below."""
    busy: float
    steal: float
    own: float
    waited_ns: dict[str, int]
    """Thread of this process -> time for which it was ready and had no core."""
    quota: tuple[int, int] | None
    """Periods of the cgroup's quota, and those in which it was used up."""


@dataclass
class HostObserver:
    """Sums up the windows of a trial; sees nothing where there is no ``/proc``."""

    windows: list[tuple[Counters, Counters]] = field(default_factory=list)
    paces_ms: list[float] = field(default_factory=list)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Count what happens inside."""
        before = counters()
        yield
        after = counters()
        if before and after and after.total > before.total:
            self.windows.append((before, after))

    def look(self) -> None:
        """Time the fixed piece of Python."""
        began, value = time.perf_counter(), 1
        for number in range(PACE_LOOPS):
            value = (value * 3 + number) & 0xFFFF
        self.paces_ms.append((time.perf_counter() - began) * 1e3)

    def load(self) -> HostLoad:
        """Sum up what was seen; not recorded where the system does not tell."""
        if not self.windows or not self.paces_ms:
            unknown: HostLoad = NOT_RECORDED
            return unknown
        total = sum(after.total - before.total for before, after in self.windows)
        busy = sum(after.busy - before.busy for before, after in self.windows)
        own = sum(after.own - before.own for before, after in self.windows)
        steal = sum(after.steal - before.steal for before, after in self.windows)
        seconds = sum(after.clock_s - before.clock_s for before, after in self.windows)
        return HostLoad(
            window_s=seconds,
            cores=len(own_cores()),
            others_pct=100 * max(0.0, busy - own) / total,
            steal_pct=100 * steal / total,
            waited_pct=_waited_pct(self.windows, seconds),
            throttled_pct=_throttled_pct(self.windows),
            pace_low_ms=min(self.paces_ms),
            pace_median_ms=statistics.median(self.paces_ms),
        )


def _waited_pct(windows: list[tuple[Counters, Counters]], seconds: float) -> float | None:
    """Tell how much of the windows the thread that waited the longest for a core waited."""
    waited: dict[str, int] = {}
    for before, after in windows:
        for thread, until_then in before.waited_ns.items():
            waited[thread] = waited.get(thread, 0) + after.waited_ns.get(thread, until_then) - until_then
    return min(100.0, max(waited.values()) / 1e7 / seconds) if waited else None


def _throttled_pct(windows: list[tuple[Counters, Counters]]) -> float | None:
    """Tell in how many of its periods the quota was used up; None without a quota."""
    known = [(before.quota, after.quota) for before, after in windows if before.quota and after.quota]
    periods = sum(after[0] - before[0] for before, after in known)
    return 100 * sum(after[1] - before[1] for before, after in known) / periods if periods else None


def counters() -> Counters | None:
    """Read what Linux has counted so far; None elsewhere, and where it counts nothing."""
    try:
        lines = (PROC / "stat").read_text().splitlines()
    except OSError:
        return None
    cores = {f"cpu{number}" for number in own_cores()}
    ticks = [list(map(int, line.split()[1:9])) for line in lines if line.split(" ")[0] in cores]
    if not ticks or any(len(each) < 8 for each in ticks):
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = map(sum, zip(*ticks, strict=True))
    busy = user + nice + system + irq + softirq
    used = os.times()
    own = used.user + used.system + used.children_user + used.children_system
    return Counters(
        clock_s=time.monotonic(),
        total=busy + idle + iowait + steal,
        busy=busy,
        steal=steal,
        own=own * os.sysconf("SC_CLK_TCK"),
        waited_ns=_waited_ns(),
        quota=_quota(),
    )


def own_cores() -> set[int]:
    """Name the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _waited_ns() -> dict[str, int]:
    """Read how long each thread waited for a core, of those that ran and were counted."""
    waited = {}
    with suppress(OSError):
        for thread in os.listdir(PROC / "self" / "task"):
            with suppress(OSError, ValueError):
                ran, ready, _ = map(int, (PROC / "self" / "task" / thread / "schedstat").read_text().split())
                if ran:
                    waited[thread] = ready
    return waited


def _quota() -> tuple[int, int] | None:
    """Read the periods of the cgroup's quota, of cgroups of either version."""
    for folder in (CGROUPS / _own_cgroup(), CGROUPS, CGROUPS / "cpu", CGROUPS / "cpu,cpuacct"):
        with suppress(OSError, ValueError):
            found = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            if "nr_periods" in found:
                return int(found["nr_periods"]), int(found["nr_throttled"])
    return None


def _own_cgroup() -> str:
    """Name this process's cgroup of version 2; the root where nothing tells."""
    with suppress(OSError):
        groups = [line.split(":", 2) for line in (PROC / "self" / "cgroup").read_text().splitlines()]
        return next((path.strip("/") for _, names, path in groups if not names), "")
    return ""
