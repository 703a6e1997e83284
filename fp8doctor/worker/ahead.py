"""Helpers of a trial: processes that load the same target and compile arms before the trial comes to them.

They are started before the target is loaded, import meanwhile what it will import
(`fp8doctor.worker.early_imports`), and load it once the trial knows that it wants them. What they compile is
in the compiler's caches on disk then: 13.8 s for the first step of FP8 blocks become 2.4 (torch 2.13, torchao
0.18, a CPU). Nothing else is left of them. A helper that dies costs nothing. One that is stopped while the
trial times something dies with the trial all the same.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from fp8doctor.facts import Facts
from fp8doctor.worker import helper_process

_log = logging.getLogger("fp8doctor")

HELPING = "helping"
"""Key of a request that makes the process a helper; its value lists what it imports at once."""

TOLD = ("target", "batch", "seq", "trial")
"""What a helper is told of the request of the process that it helps."""

READY = b"ready\n"
"""What a helper tells when it has loaded the target, which it does when it is told the device and the layers.
Then it is told one work after the other, each with all that it takes: the arm, the cut, and the facts that
the arm is planned with. It tells the seconds, null where it could not compile it, false where it found no
memory for it, or in a sentence that its GPU is lost to it, and ends."""

MOST_HELPERS, CORES_EACH = 3, 4
"""Helpers at most, and the cores that each of them and the trial need: a compilation keeps one core busy, and
several while its kernels are built."""

SETTLING_S = 0.1
"""Time for the GPU to do what helpers had queued before they were stopped. A choice: a step of the smaller
cut took 68 ms in the median of 75 recorded jobs, and theirs is the smallest. What is left after that
disturbs the first of several rounds."""

LONGEST_PAUSE_S = 5.0
"""Seconds after which helpers go on, whatever is timed. A choice: the rounds of a shape take a quarter of
one, and a lock of the compiler's caches, should one hold it, is waited for 600 s (torch 2.13)."""

_KEPT: list[subprocess.Popen[bytes]] = []
"""Those whose pipes are not theirs any more: to forget one would close what is there now."""

Work = tuple[str, int]
"""An arm, and the number of the cut at which it is compiled."""


@dataclass(eq=False)
class _Build:
    """A work that a helper is at."""

    helper: int
    """The number of the helper's process."""
    work: Work
    began: float
    """``time.monotonic``."""
    awaited: bool = True
    """Whether the trial may wait for it."""
    counts: bool = True
    """Whether the arm is still planned as it is built."""


def most_helpers() -> int:
    """Return the number of helpers that there are cores for."""
    return max(0, min(MOST_HELPERS, len(os.sched_getaffinity(0)) // CORES_EACH - 1))


class Helpers:
    """The helpers of one trial. They load the target and compile when they are told to: whoever is free takes
    the next work."""

    def __init__(self, asked: dict[str, Any], count: int, imports: Sequence[str] = ()) -> None:
        """Start them on the ``imports``, names of modules."""
        request = {key: asked[key] for key in TOLD} | {HELPING: imports, "parent": os.getpid()}
        self._facts = msgspec.Raw(b"{}")
        self._changed = threading.Condition()
        self._waiting: list[Work] = []
        self._asked: tuple[Work, ...] = ()
        self._cuts: Sequence[Mapping[str, int] | None] = ()
        self._more = False
        """Whether helpers wait for more when all is done."""
        self._taken: set[Work] = set()
        """What the trial has come to."""
        self._builds: list[_Build] = []
        self._gave_way: set[int] = set()
        """Helpers that were ended for their memory."""
        self._employed: int | None = None
        """Helpers that take work, or will once they have loaded the target; None before there was any."""
        self._took_s: dict[Work, float | None] = {}
        """What is done; None where it could not be."""
        self._lost: dict[str, str] = {}
        """Arm that cost a helper its GPU -> how, in a sentence."""
        self._told = time.monotonic()
        """When they were told to load the target."""
        self._environ = dict(os.environ)
        """What they were started with."""
        self._processes: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # the system may give no further process
            for _ in range(count):
                self._processes.append(helper_process.started(json.dumps(request)))
        self._pipes = {process.pid: helper_process.pipes(process) for process in self._processes}

    @property
    def started(self) -> int:
        """The number of helpers that there are."""
        return len(self._processes)

    def load(self, device: str, layers: int | None, count: int) -> None:
        """Have so many of them load the target for a device, and end the others.

        What the target has set in the environment holds for them from before it, as the GPUs that are seen.
        """
        for process in self._processes[:]:
            if helper_process.pipes(process) != self._pipes[process.pid]:
                # the target closed them: its files may be there
                self._processes.remove(process)
                helper_process.end(process)
                _KEPT.append(process)
        self._told, now = time.monotonic(), dict(os.environ)
        environ = {
            name: now.get(name) for name in self._environ | now if now.get(name) != self._environ.get(name)
        }
        how = {"device": device, "layers": layers, "environ": environ}
        while len(self._processes) > count:
            helper_process.end(self._processes.pop())
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # it died
                process.stdin.write(json.dumps(how).encode() + b"\n")
                process.stdin.flush()

    def know(self, facts: Facts, changed: Collection[str] = ()) -> None:
        """Take the facts that the arms are planned with from now on. What was done for the ``changed`` ones,
        or is being done, counts no more."""
        with self._changed:
            self._facts = msgspec.Raw(msgspec.json.encode(facts.to_dict()))
            self._waiting = [work for work in self._waiting if work[0] not in changed]
            self._took_s = {work: took for work, took in self._took_s.items() if work[0] not in changed}
            self._lost = {arm: lost for arm, lost in self._lost.items() if arm not in changed}
            for build in self._builds:
                if build.work[0] in changed:
                    build.awaited = build.counts = False

    def begin(
        self, work: Sequence[Work], cuts: Sequence[Mapping[str, int] | None], *, more: bool = False
    ) -> bool:
        """Queue what nobody has begun, the trial included, in the order of ``work``, and tell whether there
        is a helper. With ``more`` helpers wait for the next call when all is done."""
        if not self._processes:  # none was asked for it, or those that were are ended
            return False
        with self._changed:
            begun = {*self._took_s, *self._taken, *(build.work for build in self._builds if build.counts)}
            self._waiting = [each for each in work if each not in begun and each[0] not in self._lost]
            self._asked, self._cuts, self._more = tuple(work), cuts, more
            if self._employed is None:
                self._employed = len(self._processes)
                for process in self._processes:
                    threading.Thread(target=self._employ, args=(process,), daemon=True).start()
            self._changed.notify_all()
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the helpers, and let them go on at the end, or after `LONGEST_PAUSE_S`.

        The workers of their compilers go on: these use no GPU. Nothing may be compiled meanwhile: a helper
        that is stopped may hold a lock of the compiler's caches.
        """
        stopped = [process for process in self._processes if process.poll() is None]
        if not stopped:
            yield
            return
        bound = threading.Timer(LONGEST_PAUSE_S, helper_process.send, (stopped, signal.SIGCONT))
        bound.daemon = True
        bound.start()
        try:
            helper_process.send(stopped, signal.SIGSTOP)
            if self._builds:  # who loads the target queues little
                time.sleep(SETTLING_S)
            yield
        finally:
            helper_process.send(stopped, signal.SIGCONT)
            bound.cancel()
            bound.join()  # it wakes nobody whom the next pause stops

    def take(self, work: Work, patience_s: float | None) -> float | None:
        """Learn that the trial itself comes to it now, and return the seconds that it took to compile ahead.

        What is being compiled is waited for, so long at most. None where it was not compiled.
        """
        with self._changed:
            self._taken.add(work)
            if work in self._waiting:
                self._waiting.remove(work)
            began = time.monotonic()
            self._changed.wait_for(lambda: all(build.work != work for build in self._awaited()), patience_s)
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
            for build in self._awaited():
                if build.work[0] == arm and build.began > young_from:
                    _log.debug("%s is begun only now: the trial compiles it itself", build.work)
                    build.awaited = False

    def took_s(self, arm: str) -> float | None:
        """Return the seconds that an arm took to compile ahead at every cut that was asked for; None where it
        is not compiled at all of them."""
        with self._changed:
            took = [self._took_s.get(work) for work in self._asked if work[0] == arm]
        known = [seconds for seconds in took if seconds is not None]
        return sum(known) if known and len(known) == len(took) else None

    def lost(self, arm: str) -> str | None:
        """Tell how an arm cost a helper its GPU; None where it did not."""
        with self._changed:
            return self._lost.get(arm)

    def outcomes(self) -> dict[str, float | None]:
        """Tell `took_s` of every arm that was asked for."""
        return {arm: self.took_s(arm) for arm, _ in self._asked}

    def under_way(self) -> frozenset[str]:
        """Name the arms that are compiled now, or will be."""
        with self._changed:
            waiting = self._waiting if self._employed else ()
            return self.begun().union(arm for arm, _ in waiting)

    def begun(self) -> frozenset[str]:
        """Name the arms that are compiled now."""
        with self._changed:
            return frozenset(build.work[0] for build in self._awaited())

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

    def give_way(self) -> bool:
        """End the helper that was the last to begin something, whose work the others take up again, or one
        that is at nothing; tell whether there was one."""
        living = [process for process in self._processes if process.poll() is None]
        if not living:
            return False
        with self._changed:
            began = {build.helper: build.began for build in self._builds}
            process = max(living, key=lambda each: began.get(each.pid, 0.0))
            self._gave_way.add(process.pid)
        self._processes.remove(process)
        helper_process.end(process)
        _log.debug("a helper %s", self._after("gave way"))
        return True

    def end(self) -> bool:
        """End every helper with all that it started, and tell whether there was one."""
        there = bool(self._processes)
        for process in self._processes:
            helper_process.end(process)
        self._processes = []
        with self._changed:
            self._waiting, self._more = [], False
            self._changed.notify_all()
        return there

    def _awaited(self) -> list[_Build]:
        return [build for build in self._builds if build.awaited]

    def _employ(self, process: subprocess.Popen[bytes]) -> None:
        """Give a helper one work after the other, until none is left or it died."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(OSError), process.stdout, process.stdin:  # it died
                alive = process.stdout.readline() == READY
                _log.debug("a helper %s", self._after("loaded the target" if alive else "died"))
                while alive and (taken := self._next(process.pid)):
                    build, line = taken
                    alive = self._finish(build, helper_process.answer(process, line))
        finally:
            with self._changed:
                assert self._employed is not None
                self._employed -= 1
                self._changed.notify_all()

    def _next(self, helper: int) -> tuple[_Build, bytes] | None:
        """Take the next work, with what a helper is told of it; None where there will be none, nor anything
        that another leaves."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not (self._more or self._builds))
            if not self._waiting:
                return None
            build = _Build(helper, self._waiting.pop(0), time.monotonic())
            self._builds.append(build)
            arm, number = build.work
            return build, msgspec.json.encode((arm, self._cuts[number], self._facts))

    def _finish(self, build: _Build, told: bytes) -> bool:
        """Note what became of a work, and tell whether its helper goes on.

        One that found no memory ends: there is room for fewer. Its work, and that of one that gave way, is
        done by the others.
        """
        answer, alive = None, told.endswith(b"\n")
        try:
            answer = json.loads(told) if alive else None
        except ValueError:  # nonsense
            alive = False
        lost = answer if isinstance(answer, str) else None
        short = answer is False or (not alive and build.helper in self._gave_way)
        seconds = None if lost or short else answer
        with self._changed:
            self._builds.remove(build)
            assert self._employed is not None
            if build.counts and short and self._employed > 1 and build.work not in self._taken:
                self._waiting.insert(0, build.work)
            elif build.counts:
                self._took_s[build.work] = seconds
                if lost:  # at another cut it would cost another helper its GPU
                    self._lost[build.work[0]] = lost
                    self._waiting = [work for work in self._waiting if work[0] not in self._lost]
            self._changed.notify_all()
        how = "did not compile" if seconds is None else f"compiled in {seconds:.1f} s"
        why = ", for want of memory" if short else "" if build.counts else ", which is planned otherwise now"
        _log.debug("a helper %s", self._after(f"{how} {build.work}{why}"))
        return alive and not lost and not short

    def _after(self, done: str) -> str:
        """Tell what was done, and when, for the log."""
        return f"{done}, {time.monotonic() - self._told:.1f} s after it was told to load"
