"""Collect the reports of a job's ranks.

Nothing uses the script's process group: a collective of ours would hang if ranks step unevenly, end early or
crash, and would interleave with the script's. Each rank's listener keeps a file in a temporary folder, named
after the launcher's variables, which rank 0 makes, reads and removes. It reaches one host.
"""

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

import msgspec
from msgspec.structs import replace

from fp8doctor.errors import UserError
from fp8doctor.facts import Rank, Ranks, recorded
from fp8doctor.facts.record import NOT_RECORDED, decoder
from fp8doctor.running.script_messages import ScriptState

NAMED_BY = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that all ranks of one start of a job share, and no other job of this user."""

OTHERS_END_WITHIN_S = 10.0
"""Seconds that rank 0 waits after its end for the others. A choice: ranks end together."""

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
    names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE")
    said = (environment.get(name, "") for name in names)
    world, rank, of_host = (int(text) if text.isascii() and text.isdigit() else None for text in said)
    if world is None or world < 2:
        return None
    if rank is None:
        raise UserError(
            f"WORLD_SIZE is {world} and RANK is not set: 'run' cannot tell the processes of this job apart. "
            "Start it with torchrun or accelerate launch, or unset WORLD_SIZE"
        )
    known = "\0".join([str(os.getuid()), str(world), *(environment.get(each, "") for each in NAMED_BY)])
    name = f"fp8doctor-{hashlib.sha256(known.encode()).hexdigest()[:32]}"
    return RankPlace(rank, world, of_host, Path(tempfile.gettempdir(), name))


def _rank_of(number: int, state: ScriptState) -> Rank:
    """Build the record of a rank from its script's state, without single kernels and modules."""
    observed = state.facts.get("observed", NOT_RECORDED) if state.facts is not None else NOT_RECORDED
    if observed is not NOT_RECORDED and recorded(observed, "breakdown"):
        observed = replace(observed, breakdown=replace(observed.breakdown, groups=()))
    failed = "raised" if state.error is not None else "ended" if state.ended else "killed"
    end = "running" if state.running else failed
    return Rank(rank=number, end=end, error=state.error, observed=observed)  # type: ignore[arg-type]


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
        self._messages: dict[int, RankMessage] = {}
        if place.rank == 0:
            self._remove()  # of a job that was killed
            with contextlib.suppress(OSError):
                place.folder.mkdir(mode=0o700)

    def changed(self, state: ScriptState) -> None:
        """Write the new state, if rank 0's folder is there."""
        rank, folder = self.place.rank, self.place.folder
        message = RankMessage(_rank_of(rank, state), time.monotonic(), tuple(state.notes), os.getpid())
        self._messages[rank] = message
        if rank and self._is_safe():
            with contextlib.suppress(OSError):
                beside = folder / f".{rank}"
                beside.write_bytes(msgspec.json.encode(message))
                beside.replace(folder / str(rank))

    def ended(self, state: ScriptState, *, patient: bool) -> None:
        """Tell the end. Rank 0 waits for the others' and combines all ranks in its state.

        ``patient``: wait for ranks that run, as the launcher does.
        """
        self.changed(state)
        if self.place.rank:
            return
        patient = patient and state.error is None and state.ended
        ends_s = time.monotonic() + OTHERS_END_WITHIN_S
        while not self._read_all() and (time.monotonic() < ends_s or (patient and self._running())):
            time.sleep(TICK_S)
        self._remove()
        self._combine(state)

    def _combine(self, state: ScriptState) -> None:
        """Add all ranks to the state of rank 0: their notes, which failed first, how many are missing."""
        world, messages = self.place.world_size, self._messages
        known = {number: Rank(rank=number, end="not_seen") for number in range(self.place.of_host or 0)}
        known |= {number: message.rank for number, message in messages.items()}
        state.ranks = Ranks(world_size=world, processes=tuple(known[each] for each in sorted(known)))
        for number in sorted(messages.keys() - {self.place.rank}):
            state.notes += [f"rank {number}: {note}" for note in dict.fromkeys(messages[number].notes)]
        ends = [message.rank for message in sorted(messages.values(), key=lambda each: each.at_s)]
        if first := next((each for each in ends if each.end in ("raised", "killed")), None):
            how = f"failed first: {first.error}"
            if first.end == "killed":
                how = "ended first, without Python's own end: os._exit, exec, a signal or a crash"
            state.notes.append(f"rank {first.rank} of {world} {how}")
        if elsewhere := world - len(known):
            state.notes.append(
                f"{elsewhere} of {world} ranks were not heard of: they are on other hosts, or "
                "'fp8doctor run' is not in front of them"
            )

    def _running(self) -> int:
        return sum(each.rank.end == "running" for each in self._messages.values())

    def _read_all(self) -> bool:
        """Read the files, and tell if all ranks have ended. A rank whose listener is gone was killed."""
        for file in self.place.folder.glob("[0-9]*") if self._is_safe() else ():
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                message = decoder(RankMessage).decode(file.read_bytes())
                known = self._messages.get(message.rank.rank)
                if known is None or known.at_s < message.at_s:
                    self._messages[message.rank.rank] = message
        for message in self._messages.values():
            if message.rank.end == "running" and not is_running(message.process):
                message.rank, message.at_s = replace(message.rank, end="killed"), time.monotonic()
        return len(self._messages) - self._running() >= (self.place.of_host or self.place.world_size)

    def _remove(self) -> None:
        if self._is_safe():
            shutil.rmtree(self.place.folder, ignore_errors=True)

    def _is_safe(self) -> bool:
        """Tell if the folder is there, and only this user may write to it."""
        with contextlib.suppress(OSError):
            found = self.place.folder.lstat()
            return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
        return False


def is_running(process: int) -> bool:
    """Tell if a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
