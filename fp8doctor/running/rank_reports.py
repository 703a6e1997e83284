"""Collect the reports of a job's ranks.

Nothing uses the script's process group: a collective of ours would hang if ranks step unevenly, end early or
crash, and would interleave with the script's. Each rank's listener keeps a file in a temporary folder, named
after the launcher's variables, which rank 0 makes, reads and removes. It reaches one host.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Rank, Ranks, recorded
from fp8doctor.facts.record import decoder
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.running.script_messages import ScriptState

NAMED_BY = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that all ranks of one start of a job share, and no other job of this user."""

MEETS_WITHIN_S = 10.0
"""Seconds that rank 0 waits after its end for the others, and that they look for its folder. A choice: ranks
begin and end together."""

TICK_S = 0.05


@dataclass(frozen=True)
class RankPlace:
    """A process's place in its job, from the launcher's variables."""

    rank: int
    world_size: int
    of_host: int | None
    """Processes on this host; None if the launcher does not say."""
    folder: Path
    """Of all ranks of this host."""


def rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """Read this process's place; None if alone. Raises `UserError` without a rank."""
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
    return RankPlace(
        rank=rank,
        world_size=world,
        of_host=_number(environment, "LOCAL_WORLD_SIZE"),
        folder=Path(tempfile.gettempdir(), f"fp8doctor-{hashlib.sha256(known.encode()).hexdigest()[:32]}"),
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


class RankMessage(msgspec.Struct):
    rank: Rank
    at_s: float
    """Time of this state, on the host's monotonic clock."""
    notes: tuple[str, ...]
    process: int
    """Process that listens to the rank."""


class RankReports:
    """This rank's part in the job: a file in the folder, which rank 0 makes, reads and removes."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        if not place.rank:
            self._remove()  # of a job that was killed
            with contextlib.suppress(OSError):
                place.folder.mkdir(mode=0o700)

    def changed(self, state: ScriptState) -> bool:
        """Write the new state; False if rank 0's folder is not there: not yet, or no more."""
        beside = self.place.folder / f".{self.place.rank}"
        try:
            if self._is_safe():
                beside.write_bytes(msgspec.json.encode(self._message(state)))
                beside.replace(beside.with_name(str(self.place.rank)))
                return True
        except OSError:
            pass
        return False

    def ended(self, state: ScriptState) -> None:
        """Tell the end. Rank 0 waits for the others' and combines all ranks in its state."""
        place, until = self.place, time.monotonic() + MEETS_WITHIN_S
        if place.rank:
            while not self.changed(state) and time.monotonic() < until:  # rank 0 may start later
                time.sleep(TICK_S)
            return
        own = self._message(state)
        messages = self._read(own)
        while self._some_run(messages) and time.monotonic() < until:
            time.sleep(TICK_S)
            messages = self._read(own)
        self._remove()
        seen = {number: message.rank for number, message in messages.items()}
        known = {number: Rank(rank=number, end="not_seen") for number in range(place.of_host or 0)} | seen
        state.ranks = Ranks(
            world_size=place.world_size, processes=tuple(known[each] for each in sorted(known))
        )
        for number in sorted(messages.keys() - {place.rank}):
            state.notes += [f"rank {number}: {note}" for note in dict.fromkeys(messages[number].notes)]
        in_order = sorted(messages.values(), key=lambda each: each.at_s)
        state.notes += rank_notes(state.ranks, [each.rank for each in in_order])

    def _message(self, state: ScriptState) -> RankMessage:
        """Describe this rank, without single kernels and modules."""
        facts = state.facts or Facts()
        observed = facts.get("observed", NOT_RECORDED)
        if recorded(facts, "observed.breakdown"):
            observed = replace(observed, breakdown=replace(observed.breakdown, groups=(), modules=()))
        end: Any = "raised" if state.error is not None else "ended" if state.ended else "killed"
        end = "running" if state.running else end
        rank = Rank(rank=self.place.rank, end=end, error=state.error, observed=observed)
        return RankMessage(rank, time.monotonic(), tuple(state.notes), os.getpid())

    def _read(self, own: RankMessage) -> dict[int, RankMessage]:
        """Read all ranks' files. A rank whose listener is gone was killed."""
        messages = {own.rank.rank: own}
        for file in self.place.folder.glob("[0-9]*") if self._is_safe() else ():
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                message = decoder(RankMessage).decode(file.read_bytes())
                if message.rank.end == "running" and not is_running(message.process):
                    message.rank = replace(message.rank, end="killed")
                messages.setdefault(message.rank.rank, message)
        return messages

    def _some_run(self, messages: dict[int, RankMessage]) -> bool:
        ended = sum(each.rank.end != "running" for each in messages.values())
        return ended < (self.place.of_host or self.place.world_size)

    def _is_safe(self) -> bool:
        """Tell if the folder is there, and only this user may write to it."""
        with contextlib.suppress(OSError):
            found = self.place.folder.lstat()
            return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
        return False

    def _remove(self) -> None:
        if self._is_safe():
            shutil.rmtree(self.place.folder, ignore_errors=True)


def rank_notes(ranks: Ranks, in_order: list[Rank]) -> list[str]:
    """Name the rank that failed first (``in_order`` of their ends), and count those that are elsewhere.

    How each other rank ended is in the report's table.
    """
    notes = []
    if first := next((each for each in in_order if each.end in ("raised", "killed")), None):
        how = f"failed first: {first.error}"
        if first.end == "killed":
            how = "ended first, without Python's own end: os._exit, exec, a signal or a crash"
        notes.append(f"rank {first.rank} of {ranks.world_size} {how}")
    if elsewhere := ranks.world_size - len(ranks.processes):
        notes.append(
            f"{elsewhere} of {ranks.world_size} ranks were not heard of: they are on other hosts, or "
            "'fp8doctor run' is not in front of them"
        )
    return notes


def is_running(process: int) -> bool:
    """Tell if a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
