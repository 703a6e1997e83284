"""The ranks of a job, one line each, and how they were timed."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from fp8doctor.analysis.arms import timed_a_model
from fp8doctor.analysis.rank_comparison import PARTS, exposed_ms, exposed_of_ranks, step_ms
from fp8doctor.facts import Facts, Rank, if_recorded, recorded
from fp8doctor.wording import plural

MOST_LINES = 16
"""Ranks that are shown; two hosts of eight GPUs."""

ENDS = {
    "raised": "an exception ended it",
    "killed": "was killed, or exited without a shutdown of Python",
    "running": "still ran when rank 0 had ended",
    "not_seen": "not heard of",
}
"""Unusual end of a rank -> words for it."""


class RankLines(Struct, frozen=True):
    """The processes of a job."""

    job: str
    each: tuple[tuple[str, str], ...]
    """Name of a rank, and what is known of it."""
    more: str
    """Number of ranks that are not shown; else empty."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Write a line for the job and one for each of its processes."""
        named = (f"{rank}: {told}" for rank, told in self.each)
        return (self.job, *(f"  {line}" for line in (*named, self.more) if line))


def ranks(facts: Facts) -> RankLines | None:
    """List the ranks with their times; None for a job of one process."""
    if not recorded(facts, "ranks"):
        return None
    processes = facts.ranks.processes
    more = len(processes) - MOST_LINES
    return RankLines(
        job=_job(facts),
        each=tuple((f"rank {each.rank}", ", ".join(_line(each))) for each in processes[:MOST_LINES]),
        more=f"and {plural(more, 'rank')} more" if more > 0 else "",
    )


def _job(facts: Facts) -> str:
    kinds = if_recorded(_kinds, facts) or ()
    kind = f" ({', '.join(kinds)})" if kinds else ""
    copies, tried = if_recorded(timed_a_model, facts), any(each.tried for each in facts.arms())
    alone = "then rank 0 timed copies alone" if tried else "no copy was timed"
    then = alone if copies else "in place: nothing of the model is copied"
    profiled = any(exposed_of_ranks(facts))
    longer = " Their GPU's times are of one profiled step, which is longer." if profiled else ""
    timed = f"timed in their own steps{';' if copies else ','} {then}."
    return f"{facts.ranks.world_size} processes{kind}, {timed}{longer}"


def _kinds(facts: Facts) -> tuple[str, ...]:
    distributed = facts.training.distributed
    return tuple(filter(None, (distributed.wrapper, distributed.backend))) if distributed else ()


def _line(rank: Rank) -> Iterator[str]:
    end = rank.get("end")
    if end in ENDS:
        yield ENDS[end]
    if not recorded(rank, "observed"):
        if end != "not_seen":
            yield "no window of steps was seen"
        return
    if (step := if_recorded(step_ms, rank.observed)) is not None:
        yield f"{step:,.1f} ms/step"
    for what, read in PARTS.items():
        if (ms := if_recorded(read, rank.observed)) is not None:
            yield f"{ms:,.1f} ms {what}"
    if ms := if_recorded(exposed_ms, rank.observed):
        yield f"{ms:,.1f} ms of communication alone"
