"""A rank that raised or was killed: title, reason and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.facts import Facts, recorded
from fp8doctor.known_errors import in_a_sentence
from fp8doctor.render.rank_lines import ENDS
from fp8doctor.wording import plural


def ended_rank(facts: Facts) -> str:
    """Tell which process did not end by itself, one that raised first; empty if all did."""
    if raised := _ranks(facts, "raised"):
        return f"An exception ended rank {next(iter(raised))}"
    killed = [*_ranks(facts, "killed")]
    if len(killed) > 1:
        return f"{plural(len(killed), 'rank')} were killed, or exited without a shutdown of Python"
    return f"Rank {killed[0]} {ENDS['killed']}" if killed else ""


def why_it_ended(facts: Facts) -> Iterator[str]:
    """Write the exception of the first rank that raised, and its known cause; else that none was seen."""
    error = next(iter(_ranks(facts, "raised").values()), "")
    if not error:
        yield "A signal, a crash in native code or os._exit: no exception was seen."
        return
    yield f"{error.rstrip('.')}."
    if known := in_a_sentence(error):
        yield known


def how_to_go_on(facts: Facts) -> str:
    """Say what to do first."""
    if raised := _ranks(facts, "raised"):
        return f"Fix the exception in rank {next(iter(raised))}, then run fp8doctor again."
    return (
        "Read the exit code in the launcher's output, and fix that first: -9 is often the host's memory, "
        "-11 a crash in native code."
    )


def _ranks(facts: Facts, end: str) -> dict[int, str]:
    """Map the ranks with this end to their exceptions."""
    processes = facts.ranks.processes if recorded(facts, "ranks") else ()
    return {each.rank: each.get("error") or "" for each in processes if each.get("end") == end}
