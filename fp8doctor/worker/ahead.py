"""Helpers of a trial: processes that load the same target and compile arms before the trial comes to them.

What they compile is in the compiler's caches on disk then: 13.8 s for the first step of FP8 blocks become 2.4
(torch 2.13, torchao 0.18, a CPU). Nothing else is left of them. A helper that dies costs nothing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from fp8doctor.facts import Facts

_log = logging.getLogger("fp8doctor")

HELPING = "helping"
"""Key of a request that makes the process a helper; its value is the device."""

TOLD = ("target", "layers", "batch", "seq", "trial")
"""What a helper is told of the request of the process that it helps."""

READY = b"ready\n"
"""What a helper tells when it has loaded the target. Then it tells the seconds of each work, or null."""

Work = tuple[str, int]
"""An arm, and the number of the cut at which it is compiled."""


class Helpers:
    """The helpers of one trial. They load the target at once, and compile when they are told what: whoever is
    free takes the next work."""

    def __init__(self, asked: dict[str, Any], device: str, count: int) -> None:
        request = {key: asked[key] for key in TOLD} | {HELPING: device, "parent": os.getpid()}
        self._facts: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._waiting: list[Work] = []
        self._asked: tuple[Work, ...] = ()
        self._at_work: dict[Work, float] = {}
        """What is compiled now, and since when (``time.monotonic``)."""
        self._employed = 0
        """Helpers that take work, or will once they have loaded the target."""
        self._took_s: dict[Work, float] = {}
        self._started = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # the system may give no further process
            for _ in range(count):
                self._processes.append(_started(json.dumps(request)))

    def know(self, facts: Facts) -> None:
        """Take the facts that the arms are planned with."""
        self._facts = facts.to_dict()

    def begin(self, work: Sequence[Work], cuts: Sequence[Mapping[str, int] | None]) -> bool:
        """Have this compiled, the first of it first, and tell whether anyone is there to do it.

        ``cuts`` tells by number how many blocks each list keeps; None is the smallest of all cuts.
        """
        self._waiting, self._employed = list(work), len(self._processes)
        if self._processes:  # else none was asked for it, or those that were are ended
            self._asked = tuple(work)
        for process in self._processes:
            threading.Thread(target=self._employ, args=(process, cuts), daemon=True).start()
        return bool(self._processes)

    def take(self, work: Work, patience_s: float | None) -> float | None:
        """Learn that the trial itself comes to it now, and return the seconds that it took to compile ahead.

        What is being compiled is waited for, so long at most. None where it was not compiled.
        """
        with self._changed:
            if work in self._waiting:
                self._waiting.remove(work)
            began = time.monotonic()
            self._changed.wait_for(lambda: work not in self._at_work, patience_s)
            took_s = self._took_s.get(work)
        _log.debug(
            "the trial waited %.1f s for %s, which %s",
            time.monotonic() - began,
            work,
            "is not compiled" if took_s is None else f"took {took_s:.1f} s",
        )
        return took_s

    def pass_by(self, arm: str, least_s: float) -> None:
        """Wait no more for an arm that was begun less than so many seconds ago."""
        with self._changed:
            young_from = time.monotonic() - least_s
            for work in [each for each, began in self._at_work.items() if each[0] == arm]:
                if self._at_work[work] > young_from:
                    _log.debug("%s is begun only now: the trial compiles it itself", work)
                    del self._at_work[work]

    def took_s(self, arm: str) -> float | None:
        """Return the seconds that an arm took to compile ahead at every cut that was asked for; None where it
        is not compiled at all of them."""
        with self._changed:
            took = [self._took_s.get(work) for work in self._asked if work[0] == arm]
        known = [seconds for seconds in took if seconds is not None]
        return sum(known) if known and len(known) == len(took) else None

    def outcomes(self) -> dict[str, float | None]:
        """Tell `took_s` of every arm that was asked for."""
        return {arm: self.took_s(arm) for arm, _ in self._asked}

    def under_way(self) -> frozenset[str]:
        """Name the arms that are compiled now, or will be."""
        with self._changed:
            waiting = self._waiting if self._employed else ()
            return frozenset(arm for arm, _ in (*waiting, *self._at_work))

    def begun(self) -> frozenset[str]:
        """Name the arms that are compiled now."""
        with self._changed:
            return frozenset(arm for arm, _ in self._at_work)

    def wait_for_one(self, arms: Collection[str], timeout_s: float) -> frozenset[str]:
        """Wait, so long at most, until nobody compiles one of these arms any more, and name those that nobody
        does."""
        with self._changed:
            began = time.monotonic()
            self._changed.wait_for(lambda: not self.under_way().issuperset(arms), timeout_s)
            done = frozenset(arms) - self.under_way()
        _log.debug(
            "the trial waited %.1f s for one of %s: %s",
            time.monotonic() - began,
            ", ".join(sorted(arms)),
            ", ".join(sorted(done)) or "none",
        )
        return done

    def end(self) -> bool:
        """End every helper with all that it started, and tell whether there was one."""
        there = bool(self._processes)
        for process in self._processes:
            _end(process)
        self._processes = []
        return there

    def _employ(self, process: subprocess.Popen[bytes], cuts: Sequence[Mapping[str, int] | None]) -> None:
        """Give a helper one work after the other, until none is left or it died."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(OSError, ValueError), process.stdout, process.stdin:  # it died, or tells nonsense
                alive = _answer(process, self._facts) == READY
                _log.debug("a helper %s", self._after("loaded the target" if alive else "died"))
                while alive and (work := self._next()):
                    alive = self._finish(work, _answer(process, (work[0], cuts[work[1]])))
        finally:
            with self._changed:
                self._employed -= 1
                self._changed.notify_all()

    def _next(self) -> Work | None:
        with self._changed:
            if not self._waiting:
                return None
            work = self._waiting.pop(0)
            self._at_work[work] = time.monotonic()
            return work

    def _finish(self, work: Work, told: bytes) -> bool:
        """Note what became of a work, and tell whether its helper lives."""
        alive = told.endswith(b"\n")
        with self._changed:
            self._at_work.pop(work, None)
            if alive and (seconds := json.loads(told)) is not None:
                self._took_s[work] = seconds
            took_s = self._took_s.get(work)
            self._changed.notify_all()
        how = "did not compile" if took_s is None else f"compiled in {took_s:.1f} s"
        _log.debug("a helper %s", self._after(f"{how} {work}"))
        return alive

    def _after(self, done: str) -> str:
        """Tell what was done, and when, for the log."""
        return f"{done}, {time.monotonic() - self._started:.1f} s after its start"


def _started(request: str) -> subprocess.Popen[bytes]:
    """Start a process as this one was started. It is of the same process group, which ends with this one."""
    return subprocess.Popen(
        [*sys.orig_argv[:-1], request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a helper, and the workers of its compiler: they would go on beside what is timed."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # it starts no more of them
        for pid in list(_started_by(process.pid)):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
    process.wait()


def _started_by(pid: int) -> Iterator[int]:
    """Name the processes that one has started, and that these have, as far as the system tells."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = list(map(int, file.read().split()))
            for child in children:
                yield child
                yield from _started_by(child)


def _answer(process: subprocess.Popen[bytes], line: Any) -> bytes:
    """Send a line and hear the answer: nothing of a helper that died."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.write(msgspec.json.encode(line) + b"\n")
        process.stdin.flush()
        return process.stdout.readline()
    return b""
