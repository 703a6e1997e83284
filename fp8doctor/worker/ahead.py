"""Helpers of a trial: processes that load the same target and compile arms before the trial comes to them.

What they compile is in the compiler's caches on disk then: 13.8 s for the first step of FP8 blocks become 2.4
(torch 2.13, torchao 0.18, a CPU). Nothing else is left of them. A helper that dies costs nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from fp8doctor.facts import Facts

HELPING = "helping"
"""Key of a request that makes the process a helper; its value is the device."""

TOLD = ("target", "layers", "batch", "seq", "trial")
"""What a helper is told of the request of the process that it helps."""


class Helpers:
    """The helpers of one trial. They load the target at once, and compile when they are told what."""

    def __init__(self, asked: dict[str, Any], device: str, count: int) -> None:
        request = {key: asked[key] for key in TOLD} | {HELPING: device, "parent": os.getpid()}
        self._facts: dict[str, Any] = {}
        self._done: set[str] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # the system may give no further process
            for _ in range(count):
                self._processes.append(_started(json.dumps(request)))
        for process in self._processes:
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def know(self, facts: Facts) -> None:
        """Take the facts that the arms are planned with."""
        self._facts = facts.to_dict()

    def begin(self, arms: Sequence[str]) -> None:
        """Have the arms compiled, the first of them first."""
        for number, process in enumerate(self._processes):
            work = {"facts": self._facts, "arms": arms[number :: len(self._processes)]}
            threading.Thread(target=_tell, args=(process, work), daemon=True).start()

    def done(self) -> frozenset[str]:
        """Name the arms that are compiled."""
        return frozenset(self._done)

    def end(self) -> bool:
        """End every helper with all that it started, and tell whether there was one."""
        there = bool(self._processes)
        for process in self._processes:
            _end(process)
        self._processes = []
        return there

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._done.add(line.decode().strip())


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


def _tell(process: subprocess.Popen[bytes], work: dict[str, Any]) -> None:
    """Send the work; a helper that still loads reads it later, and one that died not at all."""
    assert process.stdin is not None
    with suppress(OSError), process.stdin:
        process.stdin.write(msgspec.json.encode(work))
