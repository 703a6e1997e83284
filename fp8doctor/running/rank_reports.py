"""Ranks of one job: where a process stands, and how their listeners collect their reports.

Nothing goes through the script's process group. A collective of ours would wait for ever if ranks step
unevenly, end early or crash, and would come between the script's own. Instead the processes that listen to
the scripts meet at a socket whose name is made of what the launcher tells all of them. It is no file, so
nothing is left behind, and it is of one host: ranks of other hosts are not heard.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Gpu, Observation, Rank, Ranks, recorded
from fp8doctor.facts.record import UnreadableDocument, from_builtins, to_builtins
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


OTHERS_END_WITHIN_S = 10.0
"""How long the report of rank 0 waits for other ranks to end after its own has. A choice: ranks of one job
end together, and a rank that still trains is said to."""

AFTER_A_CRASH_S = 5.0
"""The same where the script of rank 0 failed, and its process is gone: the launcher ends the others."""

MEETS_WITHIN_S = 3.0
"""How long a rank that has ended looks for that of rank 0. A choice: the launcher starts both at once."""

SENT_WITHIN_S = 2.0
"""How long a rank tries to hand on what it has to tell."""

TICK_S = 0.05

ANOTHER_JOB = "a job with the same MASTER_ADDR and MASTER_PORT"


class Told(msgspec.Struct):
    """What a rank tells so far; the last one counts."""

    rank: dict[str, object]
    at_s: float
    """Of the host's monotonic clock, when this was known."""
    notes: tuple[str, ...]


class Telling:
    """The end of a rank that is not 0: it tells rank 0 what it saw, and is silent otherwise."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._socket: socket.socket | None = None

    def changed(self, seen: Seen) -> None:
        """Hand on what is new. It never waits for rank 0 to be there."""
        self._tell(seen)

    def ended(self, seen: Seen, *, patient: bool) -> None:
        """Hand on how it ended. Rank 0 may have been started a moment later than this."""
        until = time.monotonic() + (MEETS_WITHIN_S if self.place.with_rank_0 else 0.0)
        while not self._tell(seen) and time.monotonic() < until:
            time.sleep(TICK_S)
        if self._socket is not None:
            self._socket.close()

    def _tell(self, seen: Seen) -> bool:
        told = Told(to_builtins(rank_of(self.place.rank, seen)), time.monotonic(), tuple(seen.notes))
        try:
            if self._socket is None:
                self._socket = _met(self.place.address)
            self._socket.sendall(msgspec.json.encode(told) + b"\n")
        except OSError:
            self._socket = None
            return False
        return True


def _met(address: bytes) -> socket.socket:
    """Connect to the process of rank 0. Raises OSError where it is not there, or is another user's."""
    met = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    met.settimeout(SENT_WITHIN_S)
    try:
        met.connect(address)
        if _peer_of(met)[1] != os.getuid():
            raise PermissionError("another user answers")
    except OSError:
        met.close()
        raise
    return met


def _peer_of(met: socket.socket) -> tuple[int, int]:
    """Tell process and user at the other end."""
    credentials = met.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


class Gathering:
    """The end of rank 0: the others come to it, and it waits for them no longer than they are worth.

    What they tell lies in the socket until the script of rank 0 has ended.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._heard: dict[int, Told] = {}
        self._open: dict[socket.socket, bytes] = {}
        self._rank_at: dict[socket.socket, int] = {}
        self._processes: dict[int, set[int]] = {}
        """Those that told of a rank; of two, one is of another job that its launcher told the same."""
        self._door: socket.socket | None = self._opened()

    def _opened(self) -> socket.socket | None:
        """Listen. The report of the job before may be about to end; None where the name stays taken."""
        until = time.monotonic() + MEETS_WITHIN_S
        while True:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                door.bind(self.place.address)
                door.listen(self.place.world_size)
                door.setblocking(False)
                return door
            except OSError:
                door.close()
                if time.monotonic() >= until:
                    return None
                time.sleep(TICK_S)

    def changed(self, seen: Seen) -> None:
        """Rank 0 knows itself."""

    def ended(self, seen: Seen, *, patient: bool) -> None:
        """Hear the others to their ends, within the time that is left, and put all ranks together.

        ``patient``: ranks that were heard of and still run are waited for, as the launcher waits for them.
        """
        failed = seen.error is not None or not seen.ended
        at_s = time.monotonic()
        until = at_s + (AFTER_A_CRASH_S if failed else OTHERS_END_WITHIN_S)
        while self._door is not None and not self._all_ended():
            more = self._listen(self._door)
            waits_on = patient and not failed and bool(self._open)
            if not more and not waits_on and time.monotonic() >= until:
                break
        while self._door is not None and self._listen(self._door):
            pass  # what came meanwhile may be of another job
        self._close()
        for number in self._of_two_jobs():
            self._heard.pop(number, None)
        self._heard[self.place.rank] = Told(to_builtins(rank_of(self.place.rank, seen)), at_s, ())
        seen.ranks = self._together()
        seen.notes += self._notes()

    def _listen(self, door: socket.socket) -> bool:
        """Hear whoever has something to say within a tick; whether anybody had."""
        speaking = select.select([door, *self._open], [], [], TICK_S)[0]
        for each in speaking:
            try:
                if each is door:
                    came, _ = door.accept()
                    came.setblocking(False)
                    if _peer_of(came)[1] == os.getuid():
                        self._open[came] = b""
                    else:
                        came.close()
                else:
                    self._read(each)
            except OSError:
                if each is not door:
                    self._gone(each)
        return bool(speaking)

    def _read(self, peer: socket.socket) -> None:
        chunk = peer.recv(1 << 20)
        *lines, self._open[peer] = (self._open[peer] + chunk).split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, UnreadableDocument):
                told = msgspec.json.decode(line, type=Told)
                number = from_builtins(Rank, told.rank).rank
                self._heard[number], self._rank_at[peer] = told, number
                self._processes.setdefault(number, set()).add(_peer_of(peer)[0])
        if not chunk:
            self._gone(peer)

    def _gone(self, peer: socket.socket) -> None:
        """A rank that is gone and did not say that it ended was killed with everything beside it."""
        del self._open[peer]
        peer.close()
        told = self._heard.get(self._rank_at.get(peer, -1))
        if told is not None and told.rank["end"] == "running":
            told.rank["end"], told.at_s = "killed", time.monotonic()

    def _all_ended(self) -> bool:
        others = (self.place.of_host or self.place.world_size) - 1
        return sum(each.rank["end"] != "running" for each in self._heard.values()) >= others

    def _close(self) -> None:
        for each in (*self._open, *([self._door] if self._door is not None else [])):
            each.close()

    def _of_two_jobs(self) -> list[int]:
        return sorted(number for number, told_by in self._processes.items() if len(told_by) > 1)

    def _together(self) -> Ranks:
        place = self.place
        expected = range(place.of_host) if place.of_host is not None else sorted(self._heard)
        known = {number: from_builtins(Rank, told.rank) for number, told in self._heard.items()}
        return Ranks(
            world_size=place.world_size,
            of_host=place.of_host,
            processes=tuple(
                known.get(number, Rank(rank=number, end="not_seen")) for number in sorted({*expected, *known})
            ),
        )

    def _notes(self) -> list[str]:
        """Say what became of the ranks, and what those beside rank 0 had to say."""
        own = [
            f"rank {number}: {note}"
            for number, told in sorted(self._heard.items())
            for note in dict.fromkeys(told.notes)
        ]
        if self._door is None:
            return [*own, f"the other ranks were not heard: {ANOTHER_JOB} is there already"]
        if two := self._of_two_jobs():
            own.append(f"left out, as {ANOTHER_JOB} runs beside this one: {named(two)}")
        order = sorted(self._heard, key=lambda number: self._heard[number].at_s)
        return [*own, *what_became_of(self._together(), order)]
