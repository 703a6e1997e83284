"""The processes of one job find each other beside it: what each saw of its script reaches the one of rank 0.

Nothing goes through the script's process group. A collective of ours would wait for ever where ranks step
unevenly, end early or crash, and would come between the script's own. Instead the processes that listen to
the scripts meet at a socket whose name is made of what the launcher tells all of them. It is no file, so that
nothing is left behind, and it is of one host: ranks of other hosts are not heard.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time

import msgspec

from fp8doctor.facts import Rank, Ranks
from fp8doctor.facts.record import UnreadableDocument, from_builtins, to_builtins
from fp8doctor.running.ranks import Place, named, rank_of, what_became_of
from fp8doctor.running.seen import Seen

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
