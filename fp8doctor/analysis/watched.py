"""The steps of a watched script: what they wait for, how ranks differ, and how a trial's copy compares."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from fp8doctor.analysis.arms import arm, timed_on_cpu
from fp8doctor.analysis.significance import EVEN, WIDEST, Number, interval
from fp8doctor.cost.matmuls import micro_batches
from fp8doctor.facts import Arm, ArmName, Facts, Observation, Rank, if_recorded, recorded
from fp8doctor.wording import minus, percent

MOST_PCT = 10.0
"""Share of the step, in per cent, from which waiting is reported before anything about FP8. A choice: three
times what this tool calls even (3%), so that fixing it moves the step more than noise does."""

LEAST_MS = 1.0
"""Part of a step, in ms, below which it is not reported, whatever its share. A choice: a loop in Python takes
tenths of it between two steps, and more on a busy host."""


def counts(ms: float, step_ms: float) -> bool:
    """Return whether a part of a step is long enough to report."""
    return ms >= LEAST_MS and 100 * ms >= MOST_PCT * step_ms


def step_ms(observed: Observation) -> float | None:
    return median(observed.steps_ms) if observed.steps_ms else None


def _data_ms(observed: Observation) -> float:
    """Read the wait inside torch's DataLoader; 0 if no such loader was asked."""
    return median(observed.data_ms) if observed.data_ms else 0.0


def _before_forward(observed: Observation) -> tuple[float, ...]:
    """Read the times from the end of a step to the next call of the model, without the wait for data."""
    data_ms = _data_ms(observed)
    return tuple(max(0.0, ms - data_ms) for ms in observed.before_forward_ms or ())


def host_is_ahead(facts: Facts) -> bool:
    """Return whether the host launches work long before the GPU finishes it."""
    behind_ms: tuple[float, ...] | None = facts.get("observed.behind_ms")
    return behind_ms is not None and 100 * median(behind_ms) >= MOST_PCT * median(facts.observed.steps_ms)


def waiting_first(facts: Facts) -> str:
    """Say what the step waits for, if that matters more than FP8; else empty, as for a step on a CPU."""
    seen = facts.observed
    if seen.get("clock") == "host":
        return ""
    whole_ms = median(seen.steps_ms)
    waits = {
        "waits for its data": _data_ms(seen),
        "spends time before the model is called": median(_before_forward(seen) or (0.0,)),
    }
    told = [
        f"{words}: {ms:,.1f} of {whole_ms:,.1f} ms ({percent(100 * ms / whole_ms)})"
        for words, ms in waits.items()
        if counts(ms, whole_ms)
    ]
    return f"The step {' and '.join(told)}" if told else ""


def _copy(facts: Facts) -> Arm | None:
    """Return the timed copy of a watched step, if a GPU ran both."""
    on_gpu = facts.observed.clock == "cuda" and not timed_on_cpu(facts)
    return arm(facts, ArmName.AS_IS) if on_gpu else None


def script_overhead(facts: Facts) -> str:
    """Say how much longer the script's step is than its timed copy, beyond waits and scatter; else empty."""
    seen, copy = facts.observed, _copy(facts)
    if copy is None or not copy.step_ms:
        return ""
    own, before_ms = interval(seen.steps_ms), median(_before_forward(seen) or (0.0,))
    waited_ms = _data_ms(seen) + max(before_ms, seen.get("host_copies_ms", 0.0))
    if not counts(own.low - waited_ms - (copy.get("high_ms") or copy.step_ms), own.value):
        return ""
    return f"The script's step takes {minus(own.value, copy.step_ms):,.1f} ms more than its timed copy"


# --- ranks ---


def _computing(observed: Observation) -> tuple[float, ...]:
    """Read what the GPU did in the profiled step next to communication, with times as profiled.

    What makes a profiled step longer than the others is the wait for the other ranks, in their exchange.
    """
    if observed.clock != "cuda":
        return ()
    parts, scale = observed.breakdown.families_ms, float(observed.breakdown.get("scale", 1.0))
    return (scale * (sum(parts.values()) - parts.get("communication", 0.0)),)


WAITS: dict[str, Callable[[Observation], tuple[float, ...]]] = {
    "waiting for data": lambda observed: observed.data_ms or (),
    "before its forward": _before_forward,
}
"""Waits that FP8 does not shorten -> how to read them, in ms of each step."""

PARTS: dict[str, Callable[[Observation], tuple[float, ...]]] = {**WAITS, "of its GPU's computing": _computing}
"""Work of a rank before the others can go on -> how to read it, in ms of each step."""


class Behind(NamedTuple):
    """Where one rank takes longer than the others. Medians, in ms, of the other ranks and of all steps."""

    rank: int
    what: str
    own_ms: float
    others_ms: float
    step_ms: float

    @property
    def by_ms(self) -> float:
        return self.own_ms - self.others_ms

    @property
    def in_words(self) -> str:
        return (
            f"Rank {self.rank} takes {self.own_ms:,.1f} ms {self.what}, the others {self.others_ms:,.1f} ms"
        )


def timed_ranks(facts: Facts) -> tuple[Rank, ...]:
    """Keep the ranks whose window was seen."""
    return tuple(each for each in facts.ranks.processes if recorded(each, "observed.steps_ms"))


def behind(facts: Facts) -> tuple[Behind, ...]:
    """Find the slower ranks, the slowest first; by their steps only those that no wait explains.

    Ranks that wait for each other take the same time for a step. The slow one shows by its time before the
    others can go on. What GPUs compute does not show it: kernels are slow next to an exchange that waits.
    """
    ranks, found = timed_ranks(facts), list[Behind]()
    whole_ms = median(median(each.observed.steps_ms) for each in ranks) if ranks else 0.0
    for what, read in {**WAITS, "for a step": lambda observed: observed.steps_ms}.items():
        explained = set[int]() if what in WAITS else {each.rank for each in found}
        samples = {each.rank: if_recorded(read, each.observed) or () for each in ranks}
        seen = {rank: interval(ms) for rank, ms in samples.items() if ms}
        for rank, own in seen.items():
            others = [each.value for other, each in seen.items() if other != rank]
            if others and rank not in explained and counts(own.low - median(others), whole_ms):
                found.append(Behind(rank, what, own.value, median(others), whole_ms))
    return tuple(sorted(found, key=lambda each: -each.by_ms))


def late_ms(facts: Facts) -> float:
    """Read how long the ranks wait for one that is late with its forward, which FP8 does not shorten."""
    found = behind(facts) if recorded(facts, "ranks") else ()
    return max((each.by_ms for each in found if each.what in WAITS), default=0.0)


def exposed_ms(observed: Observation) -> float | None:
    """Read the profiled step's communication that no other work of the GPU covered.

    A profiled step may be longer than the others; theirs have at most the time that computing leaves.
    """
    alone_ms = observed.breakdown.families_ms.get("communication", 0.0)
    left_ms = [median(observed.steps_ms) - ms for ms in _computing(observed)]
    return max(0.0, min(alone_ms, *left_ms)) if left_ms else None


def exposed_of_ranks(facts: Facts) -> tuple[float, ...]:
    """Read each profiled rank's exposed communication, in ms. The rank with the least waits for no other."""
    ranks = timed_ranks(facts) if recorded(facts, "ranks") else ()
    seen = [each.observed for each in ranks] or [facts.get("observed")]
    return tuple(ms for each in seen if each and (ms := if_recorded(exposed_ms, each)) is not None)


# --- the whole step of a job whose compute alone was timed ---

MOST_SLOWER = 0.1
"""Share of the job's step by which a copy may take longer. A choice: a copy with Transformer Engine took 7%
longer on a busy host, and its bounds held."""


def copy_overhead(facts: Facts) -> bool:
    """Return whether the timed copy takes longer than the job's own step by more than `MOST_SLOWER`."""
    copy_ms = copy.step_ms if (copy := _copy(facts)) else None
    return bool(copy_ms) and (copy_ms or 0.0) > (1 + MOST_SLOWER) * median(facts.observed.steps_ms)


def timed_alone(facts: Facts) -> bool:
    """Tell if the timed copies are not all of the job's step.

    They lack the communication that the job has, take less than its own step, or take one batch of a job
    whose batches differ: 1.11x of one was 0.97x for a script with samples of one to three times a length
    (h200-reward_variable).
    """
    if not any(each.tried for each in facts.arms()):
        return False
    steps = interval(facts.get("observed.steps_ms") or (1.0,))  # a machine makes them differ by less
    differ = facts.get("observed.clock") == "cuda" and steps.high >= WIDEST * steps.low
    return _is_spread(facts) or differ or bool(if_recorded(script_overhead, facts))


def _is_spread(facts: Facts) -> bool:
    distributed = facts.get("training.distributed")
    return distributed is not None and (distributed.world_size > 1 or distributed.wrapper is not None)


def whole_speedup(
    facts: Facts, speedup: Number | None, bf16_ms: float | None, *, has_fp8: bool
) -> tuple[float, float] | None:
    """Bound the whole step's speedup over the best BF16; None if the copies are all of it, or it is unknown.

    ``speedup`` is that of the copies. The job's step has more than its copy: communication, casts of gathered
    FP8 weights, other kernels of its wrapper, idle time. A BF16 step has the other kernels too. It may have
    work in place of the casts, wait as long, and cover as little of its communication, or none of these: that
    gives its bounds. A future FP8 may wait longer, so that only its most is known (1.10x of copies was 0.93x
    of scripts on an H100: FSDP2, research/benchmarks/results/sharded_trials_h100.md); so is that of one
    process, whose BF16 may wait too. The steps of job and copies vary, and so do the bounds.
    """
    if speedup is None or speedup.basis != "measured" or speedup.side == "open" or not bf16_ms:
        return None
    seen, copy = facts.observed, arm(facts, ArmName.AS_IS)
    own_ms, copy_ms = exposed_ms(seen), copy.step_ms if copy else None
    if not timed_alone(facts) or own_ms is None or not seen.steps_ms or not copy or not copy_ms:
        return None
    watched = interval(seen.steps_ms)
    whole_ms = watched.value
    if copy_overhead(facts):
        return None  # the copy, which has less to do, took longer
    on_top_ms = max(0.0, whole_ms - copy_ms)
    if not has_fp8:
        return 0.0, (bf16_ms + on_top_ms) / (bf16_ms / speedup.high + on_top_ms)
    least_bf16_ms, most_bf16_ms = copy_ms * speedup.low, copy_ms * speedup.high
    least_ms = min([own_ms, *exposed_of_ranks(facts)])  # of the rank that waits for no other
    shared_ms = min(least_ms, whole_ms)
    casts_ms, waiting_ms = 0.0, whole_ms - copy_ms - own_ms
    parts = copy.get("breakdown")
    if parts is not None and recorded(parts, "families_ms"):
        job = seen.breakdown
        casts_ms = max(0.0, job.families_ms.get("cast", 0.0) - parts.families_ms.get("cast", 0.0))
        waiting_ms = max(0.0, job.idle_ms - parts.idle_ms)
    if waiting_ms < EVEN * whole_ms:
        waiting_ms = 0.0
    kernels_ms = max(0.0, on_top_ms - shared_ms - casts_ms - waiting_ms - (own_ms - least_ms))
    covered_ms = shared_ms if waiting_ms else max(0.0, least_bf16_ms - copy_ms)
    low = (least_bf16_ms + kernels_ms + max(0.0, shared_ms - covered_ms)) / watched.high
    return low if _is_spread(facts) else 0.0, (most_bf16_ms + max(on_top_ms, shared_ms)) / watched.low


# --- the model of a step next to the watched one ---


class Run(NamedTuple):
    """A watched step, and what every form of it has, in ms."""

    ms: float
    shared_ms: float
    """Communication, and waits for a late rank."""
    exposed_ms: float
    """Its exposed communication, which BF16 may cover because it computes longer."""
    idle_ms: float
    """How long its GPU was idle, as profiled."""
    own_idle_ms: float
    """The same without the wait for a late rank."""
    families_ms: dict[str, float]
    """Empty if it was not profiled."""
    is_spread: bool
    """True if several GPUs share the step, or may."""


def watched_run(facts: Facts) -> Run | None:
    """Read the step of a watched script, if the model is of the GPU that ran it."""
    watched = facts.get("observed.clock") == "cuda" and facts.observed.steps_ms
    if not watched or facts.get("assumed_gpu") or micro_batches(facts) > 1:
        return None
    ran_ms = median(facts.observed.steps_ms)
    exposed_ms = min(if_recorded(exposed_of_ranks, facts) or (0.0,))
    late = if_recorded(late_ms, facts) or 0.0
    profile = facts.observed.breakdown if recorded(facts.observed, "breakdown.families_ms") else None
    profile = profile if profile and profile.get("reliable", True) else None
    idle_ms, took = 0.0, dict[str, float]()
    if profile:
        idle_ms = profile.get("idle_ms", 0.0)
        took = {name: profile.get("scale", 1.0) * ms for name, ms in profile.families_ms.items()}
    shared_ms, spread = min(ran_ms, exposed_ms + late), bool(if_recorded(_is_spread, facts))
    return Run(ran_ms, shared_ms, exposed_ms, idle_ms, idle_ms - late, took, spread)
