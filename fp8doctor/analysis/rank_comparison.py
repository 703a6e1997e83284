"""The ranks of a job compared: which is slower than the others, and in what.

Ranks that wait for each other take the same time for a step. The slow one shows by its time before the
others can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from msgspec import Struct

from fp8doctor.analysis.significance import interval
from fp8doctor.analysis.waiting import counts
from fp8doctor.facts import Facts, Gpu, Observation, Rank, if_recorded, recorded


class Behind(Struct, frozen=True):
    """Where one rank takes longer than the others. Medians, in ms."""

    rank: int
    what: str
    own_ms: float
    others_ms: float
    """Median of the other ranks."""
    step_ms: float
    """Median of all ranks' steps."""

    @property
    def by_ms(self) -> float:
        return self.own_ms - self.others_ms


def _data(observed: Observation) -> float | None:
    return None if observed.data_ms is None else median(observed.data_ms)


def _before_forward(observed: Observation) -> float | None:
    if observed.before_forward_ms is None:
        return None
    return max(0.0, median(observed.before_forward_ms) - (_data(observed) or 0.0))


def step_ms(observed: Observation) -> float | None:
    """Read the median of a rank's steps."""
    return median(observed.steps_ms) if observed.steps_ms else None


def exposed_ms(observed: Observation) -> float | None:
    """Read the profiled step's communication that no other work of the GPU covered.

    A profiled step may be longer than the others; theirs have at most the time that computing leaves.
    """
    computing = _computing(observed)
    if computing is None:
        return None
    alone = observed.breakdown.families_ms.get("communication", 0.0)
    return max(0.0, min(alone, median(observed.steps_ms) - computing)) if alone else 0.0


def exposed_of_ranks(facts: Facts) -> tuple[float, ...]:
    """Read each profiled rank's exposed communication, in ms. The rank with the least waits for no other."""
    ranks = timed_ranks(facts) if recorded(facts, "ranks") else ()
    seen = [each.observed for each in ranks] or [facts.get("observed")]
    return tuple(ms for each in seen if each and (ms := if_recorded(exposed_ms, each)) is not None)


def late_ms(facts: Facts) -> float:
    """Read how long the ranks wait for one that is late with its forward, which FP8 does not shorten."""
    found = behind(facts) if recorded(facts, "ranks") else ()
    return max((each.by_ms for each in found if each.what in WAITS), default=0.0)


def _computing(observed: Observation) -> float | None:
    """Read what the GPU did in the profiled step next to communication.

    Times as profiled: the breakdown is compared with the length of the window's steps, and what makes a
    profiled step longer is the wait for the other ranks, in the kernels of their exchange.
    """
    if observed.clock != "cuda":
        return None
    parts, scale = observed.breakdown.families_ms, float(observed.breakdown.get("scale", 1.0))
    return scale * (sum(parts.values()) - parts.get("communication", 0.0))


WAITS: dict[str, Callable[[Observation], float | None]] = {
    "waiting for data": _data,
    "before its forward": _before_forward,
}
"""Waits that FP8 does not shorten -> how to read them, in ms."""

PARTS: dict[str, Callable[[Observation], float | None]] = {
    **WAITS,
    "of its GPU's computing": _computing,
}
"""Work of a rank before the others can go on -> how to read it, in ms."""

EACH = {"waiting for data": "data_ms", "before its forward": "before_forward_ms"}
"""Work that was timed in every step -> field of its times."""


def timed_ranks(facts: Facts) -> tuple[Rank, ...]:
    """Keep the ranks whose window was seen."""
    return tuple(each for each in facts.ranks.processes if recorded(each, "observed.steps_ms"))


def behind(facts: Facts) -> tuple[Behind, ...]:
    """Find the slower ranks, the slowest first; empty if fewer than two were timed."""
    ranks = timed_ranks(facts)
    steps = [ms for each in ranks if (ms := step_ms(each.observed)) is not None]
    if len(ranks) < 2 or not steps:
        return ()
    found = [
        each
        for what, read in (*PARTS.items(), ("for a step", step_ms))
        for each in _of(what, read, ranks, median(steps))
    ]
    with_cause = {each.rank for each in found if each.what in PARTS}
    causes = [
        each
        for each in found
        if each.what in PARTS or (each.rank not in with_cause and _steps_longer(each.rank, ranks))
    ]
    return tuple(sorted(causes, key=lambda each: -each.by_ms))


def slowest_first(facts: Facts) -> str:
    """Name the rank that keeps others waiting, which matters more than FP8."""
    worst = next(iter(behind(facts)), None)
    if worst is None or worst.what not in WAITS:
        return ""
    return f"Rank {worst.rank} keeps the others waiting"


def _steps_longer(rank: int, ranks: tuple[Rank, ...]) -> bool:
    """Return whether a rank's steps are longer than the others', beyond their scatter."""
    own = [ms for each in ranks if each.rank == rank for ms in each.observed.steps_ms]
    others = [ms for each in ranks if each.rank != rank for ms in each.observed.steps_ms]
    return interval(own).low > interval(others).high


def _scatter_ms(observed: Observation, what: str) -> float:
    """Return how far a rank's wait may be below its median; 0 if rarely timed."""
    found = interval(getattr(observed, EACH[what])) if what in EACH else None
    return found.median - found.low if found is not None else 0.0


def _of(
    what: str, read: Callable[[Observation], float | None], ranks: tuple[Rank, ...], step: float
) -> Iterator[Behind]:
    """Compare one part of the step: every rank with the median of the others."""
    values = {each.rank: ms for each in ranks if (ms := if_recorded(read, each.observed)) is not None}
    scatters = {each.rank: _scatter_ms(each.observed, what) for each in ranks if each.rank in values}
    for rank, own in values.items():
        others = [ms for other, ms in values.items() if other != rank]
        if others and counts(own - scatters[rank] - median(others), step):
            yield Behind(rank, what, own, median(others), step)


GPU_READ: dict[str, tuple[str, str]] = {
    "name": ("", ""),
    "power_limit_w": ("power limit", " W"),
    "sm_clock_max_mhz": ("highest clock", " MHz"),
}
"""Properties that GPUs of one job should share -> name and unit."""


def unlike_gpus(facts: Facts) -> dict[int, str]:
    """Describe the GPUs of the ranks by their differences; empty if they are alike."""
    gpus = {each.rank: gpu for each in facts.ranks.processes if (gpu := each.get("gpu")) is not None}
    unlike = [
        name
        for name in GPU_READ
        if len({getattr(gpu, name) for gpu in gpus.values() if recorded(gpu, name)}) > 1
    ]
    if not unlike:
        return {}

    def told(gpu: Gpu, name: str) -> str:
        called, unit = GPU_READ[name]
        return f"{called} {gpu.get(name, 'unknown')}{unit}".strip()

    return {rank: ", ".join(told(gpu, name) for name in unlike) for rank, gpu in gpus.items()}
