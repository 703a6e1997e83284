"""Collect the reports of a job's ranks.

Nothing uses the script's process group: a collective of ours would hang if ranks step unevenly, end early or
crash, and would interleave with the script's. The listeners meet at an abstract socket instead, named after
the launcher's variables. It leaves no file and reaches one host.
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
from fp8doctor.facts.record import Lines, decoder
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.running.script_messages import ScriptState
from fp8doctor.wording import plural

NAMED_BY = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that all ranks of one start of a job share, and no other job of this user."""


@dataclass(frozen=True)
class RankPlace:
    """A process's place in its job, from the launcher's variables."""

    rank: int
    world_size: int
    of_host: int | None
    """Processes on this host; None if the launcher does not say."""
    with_rank_0: bool
    """Rank 0 is on this host, as far as the launcher says."""
    address: bytes
    """Address of this host's socket."""


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
        with_rank_0=_number(environment, "GROUP_RANK") in (None, 0),
        address=b"\0fp8doctor-" + hashlib.sha256(known.encode()).hexdigest()[:32].encode(),
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def rank_of(number: int, state: ScriptState) -> Rank:
    """Build the record of a rank from its script's state."""
    facts = state.facts
    return Rank(
        rank=number,
        end="running"
        if state.running
        else "raised"
        if state.error is not None
        else "ended"
        if state.ended
        else "killed",
        error=state.error,
        steps=state.all_steps,
        complete=state.complete,
        observed=_window(facts.observed) if facts and recorded(facts, "observed") else NOT_RECORDED,
        gpu=gpu_of(facts) if facts is not None else NOT_RECORDED,
    )


def _window(observed: Observation) -> Observation:
    """Drop single kernels and modules from the window's breakdown."""
    if not recorded(observed, "breakdown"):
        return observed
    return replace(observed, breakdown=replace(observed.breakdown, groups=(), modules=()))


def gpu_of(facts: Facts) -> Gpu | None:
    """Return the GPU with the model, or None."""
    if not recorded(facts, "training.distributed.device") or not recorded(facts, "gpus"):
        return None
    distributed = facts.training.distributed
    visible = [each for each in facts.gpus if not recorded(each, "visible") or each.visible]
    if distributed is None or distributed.device is None or distributed.device >= len(visible):
        return None
    return visible[distributed.device]


def rank_notes(ranks: Ranks, order: list[int]) -> list[str]:
    """Name failed (in ``order``), running, uneven and missing ranks."""
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
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


OTHERS_END_WITHIN_S = 10.0
"""Seconds that rank 0 waits after its end for the others. A choice: ranks end together."""

AFTER_A_CRASH_S = 5.0
"""The same if rank 0 failed: the launcher ends the others."""

MEETS_WITHIN_S = 3.0
"""Seconds that a rank looks for rank 0. A choice: the launcher starts both at once."""

SENT_WITHIN_S = 2.0
"""Seconds that a rank tries to send a message."""

TICK_S = 0.05

ANOTHER_JOB = "a job with the same MASTER_ADDR and MASTER_PORT"


class RankMessage(msgspec.Struct):
    """A rank's state and notes; the last message counts."""

    rank: Rank
    at_s: float
    """Time of this state, on the host's monotonic clock."""
    notes: tuple[str, ...]


class RankSender:
    """A rank other than 0: sends its state to rank 0."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self._socket: socket.socket | None = None

    def changed(self, state: ScriptState) -> None:
        """Send the new state, without waiting for rank 0."""
        self._send(state)

    def ended(self, state: ScriptState, *, patient: bool) -> None:
        """Send the final state; rank 0 may have started later."""
        until = time.monotonic() + (MEETS_WITHIN_S if self.place.with_rank_0 else 0.0)
        while not self._send(state) and time.monotonic() < until:
            time.sleep(TICK_S)
        if self._socket is not None:
            self._socket.close()

    def _send(self, state: ScriptState) -> bool:
        message = RankMessage(rank_of(self.place.rank, state), time.monotonic(), tuple(state.notes))
        try:
            if self._socket is None:
                self._socket = _connected(self.place.address)
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            self._socket = None
            return False
        return True


def _connected(address: bytes) -> socket.socket:
    """Connect to rank 0. Raises OSError if it is missing, or is another user's."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(SENT_WITHIN_S)
    try:
        peer.connect(address)
        if _peer_of(peer)[1] != os.getuid():
            raise PermissionError("another user answers")
    except OSError:
        peer.close()
        raise
    return peer


def _peer_of(peer: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


class RankCollector:
    """Rank 0: collects the other ranks' messages at the end, with a timeout."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self._decoder = decoder(RankMessage)
        self._messages: dict[int, RankMessage] = {}
        self._open: dict[socket.socket, Lines] = {}
        self._rank_at: dict[socket.socket, int] = {}
        self._processes: dict[int, set[int]] = {}
        """Senders of each rank's messages. Two mean another job with the same variables."""
        self._server: socket.socket | None = self._listening()

    def _listening(self) -> socket.socket | None:
        """Listen; None if the address stays taken, at first by the previous job's report."""
        until = time.monotonic() + MEETS_WITHIN_S
        while True:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.bind(self.place.address)
                server.listen(self.place.world_size)
                server.setblocking(False)
                return server
            except OSError:
                server.close()
                if time.monotonic() >= until:
                    return None
                time.sleep(TICK_S)

    def changed(self, state: ScriptState) -> None:
        """Do nothing: rank 0 knows its own state."""

    def ended(self, state: ScriptState, *, patient: bool) -> None:
        """Read the others' messages until they end or time is up, and combine all ranks.

        ``patient``: wait for ranks that are connected and run, as the launcher does.
        """
        failed = state.error is not None or not state.ended
        at_s = time.monotonic()
        until = at_s + (AFTER_A_CRASH_S if failed else OTHERS_END_WITHIN_S)
        while self._server is not None and not self._all_ended():
            more = self._listen(self._server)
            waits_on = patient and not failed and bool(self._open)
            if not more and not waits_on and time.monotonic() >= until:
                break
        while self._server is not None and self._listen(self._server):
            pass  # what came meanwhile may be of another job
        self._close()
        for number in self._of_two_jobs():
            self._messages.pop(number, None)
        self._messages[self.place.rank] = RankMessage(rank_of(self.place.rank, state), at_s, ())
        state.ranks = self._together()
        state.notes += self._notes()

    def _listen(self, server: socket.socket) -> bool:
        """Take messages for one tick. Return whether there were any."""
        speaking = select.select([server, *self._open], [], [], TICK_S)[0]
        for each in speaking:
            try:
                if each is server:
                    came, _ = server.accept()
                    came.setblocking(False)
                    if _peer_of(came)[1] == os.getuid():
                        self._open[came] = Lines()
                    else:
                        came.close()
                else:
                    self._read(each)
            except OSError:
                if each is not server:
                    self._disconnected(each)
        return bool(speaking)

    def _read(self, peer: socket.socket) -> None:
        chunk = peer.recv(1 << 20)
        for line in self._open[peer].add(chunk):
            with contextlib.suppress(msgspec.MsgspecError):
                message = self._decoder.decode(line)
                number = message.rank.rank
                self._messages[number], self._rank_at[peer] = message, number
                self._processes.setdefault(number, set()).add(_peer_of(peer)[0])
        if not chunk:
            self._disconnected(peer)

    def _disconnected(self, peer: socket.socket) -> None:
        """Mark a rank that left without its end as killed."""
        del self._open[peer]
        peer.close()
        message = self._messages.get(self._rank_at.get(peer, -1))
        if message is not None and message.rank.end == "running":
            message.rank, message.at_s = replace(message.rank, end="killed"), time.monotonic()

    def _all_ended(self) -> bool:
        others = (self.place.of_host or self.place.world_size) - 1
        return sum(each.rank.end != "running" for each in self._messages.values()) >= others

    def _close(self) -> None:
        for each in (*self._open, *([self._server] if self._server is not None else [])):
            each.close()

    def _of_two_jobs(self) -> list[int]:
        return sorted(number for number, processes in self._processes.items() if len(processes) > 1)

    def _together(self) -> Ranks:
        place = self.place
        expected = range(place.of_host) if place.of_host is not None else sorted(self._messages)
        known = {number: message.rank for number, message in self._messages.items()}
        return Ranks(
            world_size=place.world_size,
            of_host=place.of_host,
            processes=tuple(
                known.get(number, Rank(rank=number, end="not_seen")) for number in sorted({*expected, *known})
            ),
        )

    def _notes(self) -> list[str]:
        """Return the ranks' own notes, and those about them."""
        own = [
            f"rank {number}: {note}"
            for number, message in sorted(self._messages.items())
            for note in dict.fromkeys(message.notes)
        ]
        if self._server is None:
            return [*own, f"the other ranks were not heard: {ANOTHER_JOB} is there already"]
        if two := self._of_two_jobs():
            own.append(f"left out, as {ANOTHER_JOB} runs next to this one: {named(two)}")
        order = sorted(self._messages, key=lambda number: self._messages[number].at_s)
        return [*own, *rank_notes(self._together(), order)]
