"""The process of a helper: how it is started, asked, stopped and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress


def started(request: str) -> subprocess.Popen[bytes]:
    """Start a process as this one was started. It is of the same process group, which ends with this one."""
    return subprocess.Popen(
        [*sys.orig_argv[:-1], request],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def pipes(process: subprocess.Popen[bytes]) -> list[tuple[int, int]] | None:
    """Tell the pipes to and from a helper apart from other files under their numbers; None where one is
    closed."""
    try:
        found = [os.fstat(pipe.fileno()) for pipe in (process.stdin, process.stdout) if pipe]
    except OSError:
        return None
    return [(each.st_dev, each.st_ino) for each in found]


def send(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to those that are there still."""
    for process in processes:
        process.send_signal(number)


def end(process: subprocess.Popen[bytes]) -> None:
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


def answer(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a line and hear the answer: nothing of a helper that died."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        return process.stdout.readline()
    return b""
