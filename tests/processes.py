"""Leave no process behind when the tests are stopped, by Ctrl-C or SIGTERM.

Whatever a test starts inherits a variable that names this run. What a test starts with an environment of its
own is found as a descendant.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType

import pytest

MARK = "FP8DOCTOR_TESTS_RUN"
ROUNDS = 40
"""Looks for processes that began meanwhile, 50 ms apart."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and MARK not in os.environ:
        os.environ[MARK] = str(os.getpid())
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGHUP, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    if started_here():
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)  # in a fork of a test
    signal.raise_signal(number)


def started_here() -> bool:
    return os.environ.get(MARK) == str(os.getpid())


def pytest_keyboard_interrupt() -> None:
    end_all()


def pytest_unconfigure() -> None:
    end_all()


def end_all() -> None:
    if not started_here():
        return
    for _ in range(ROUNDS):
        now = alive()
        for process in now:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not now:
            return
        time.sleep(0.05)


def alive() -> set[int]:
    """Find the processes of this run but this one, zombies aside."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            marked = f"{MARK}={os.getpid()}\0".encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if state != "Z":
            parents[int(folder.name)] = int(parent)
            found |= {int(folder.name)} if marked else set()
    found |= {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
