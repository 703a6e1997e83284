"""The processes of one job: where each stands in it, what each saw, and what became of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Gpu, Observation, Rank, Ranks, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.running.seen import Seen
from fp8doctor.wording import plural

NAMED_BY = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that all ranks of one start of one job have in common, and no others of this user."""


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job, as the launcher tells it."""

    rank: int
    world_size: int
    of_host: int | None
    """Processes on this host; None where the launcher does not say."""
    with_rank_0: bool
    """Whether rank 0 is on this host, as far as the launcher says."""
    address: bytes
    """Of the socket where the ranks of this host meet."""


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Read where this process stands; None where it is alone. Raises `UserError` where it cannot be told."""
    world = _number(environment, "WORLD_SIZE")
    if world is None or world < 2:
        return None
    rank = _number(environment, "RANK")
    if rank is None:
        raise UserError(
            f"WORLD_SIZE is {world} and RANK is not set: 'run' cannot tell the processes of this job apart. "
            "Start it with torchrun or accelerate launch, or unset WORLD_SIZE"
        )
    known = "\0".join([str(os.getuid()), str(world), *(environment.get(each, "") for each in NAMED_BY)])
    return Place(
        rank=rank,
        world_size=world,
        of_host=_number(environment, "LOCAL_WORLD_SIZE"),
        with_rank_0=_number(environment, "GROUP_RANK") in (None, 0),
        address=b"\0fp8doctor-" + hashlib.sha256(known.encode()).hexdigest()[:32].encode(),
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def rank_of(number: int, seen: Seen) -> Rank:
    """Put what was seen of a script into the record of its rank."""
    facts = seen.facts
    return Rank(
        rank=number,
        end="running"
        if seen.running
        else "raised"
        if seen.error is not None
        else "ended"
        if seen.ended
        else "killed",
        error=seen.error,
        steps=seen.all_steps,
        complete=seen.complete,
        observed=_window(facts.observed) if facts and recorded(facts, "observed") else NOT_RECORDED,
        gpu=gpu_of(facts) if facts is not None else NOT_RECORDED,
    )


def _window(observed: Observation) -> Observation:
    """The window with its breakdown, without the single kernels and modules of that."""
    if not recorded(observed, "breakdown"):
        return observed
    return replace(observed, breakdown=replace(observed.breakdown, groups=(), modules=()))


def gpu_of(facts: Facts) -> Gpu | None:
    """Find the GPU that holds the model; None where none does."""
    if not recorded(facts, "training.distributed.device") or not recorded(facts, "gpus"):
        return None
    distributed = facts.training.distributed
    visible = [each for each in facts.gpus if not recorded(each, "visible") or each.visible]
    if distributed is None or distributed.device is None or distributed.device >= len(visible):
        return None
    return visible[distributed.device]


def what_became_of(ranks: Ranks, order: list[int]) -> list[str]:
    """Name the ranks that failed, the first first, those that took other numbers of steps, and those that
    were not heard of."""
    by_rank = {each.rank: each for each in ranks.processes}
    failed = [by_rank[each] for each in order if by_rank[each].end in ("raised", "killed")]
    sentences = []
    if failed:
        first, *rest = failed
        then = f"; after it {named([each.rank for each in rest])}" if rest else ""
        before = [by_rank[each] for each in order[: order.index(first.rank)]]
        over = ", ".join(
            f"rank {each.rank}{_after(each)}" for each in before if each.end == "ended" and _after(each)
        )
        was = f"; ended before it, without an exception: {over}" if over else ""
        sentences.append(f"rank {first.rank} of {ranks.world_size} {_failed(first)}{then}{was}")
    if running := [each.rank for each in ranks.processes if each.end == "running"]:
        sentences.append(f"still running when rank 0 had ended: {named(running)}")
    steps = {each.rank: each.steps for each in ranks.processes if each.end == "ended" and each.steps}
    if len(set(steps.values())) > 1:
        taken = ", ".join(f"rank {number} {plural(count, 'step')}" for number, count in steps.items())
        sentences.append(f"the ranks took different numbers of steps: {taken}")
    if missing := [each.rank for each in ranks.processes if each.end == "not_seen"]:
        sentences.append(f"not heard of: {named(missing)}")
    if elsewhere := ranks.world_size - len(ranks.processes):
        sentences.append(
            f"{elsewhere} of {ranks.world_size} ranks were not heard of: they are on other hosts, or "
            "'fp8doctor run' is not in front of them"
        )
    return sentences


def _after(rank: Rank) -> str:
    return (
        f" after {plural(rank.steps, 'step')}" if recorded(rank, "steps") and rank.steps is not None else ""
    )


def _failed(rank: Rank) -> str:
    if rank.end == "raised":
        return f"failed first{_after(rank)}: {rank.error}"
    return f"ended first{_after(rank)}, without Python's own end: os._exit, exec, a signal or a crash"


def named(numbers: list[int]) -> str:
    """Write ranks by their numbers."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
