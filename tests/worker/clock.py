"""A clock for the parent's limits, so that no test waits for one or depends on how fast this machine is."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8doctor.worker import parent


def hang(file: Path) -> str:
    """A Python expression that never ends, for a child: ``file`` grows all the while."""
    return (
        f"[(open({str(file)!r}, 'a').write('x'), __import__('time').sleep(0.05)) for _ in iter(lambda: 0, 1)]"
    )


def late_while_it_grows(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit passes whenever `hang` lets ``file`` grow."""

    def monotonic() -> float:
        return time.monotonic() + 1e6 * (file.stat().st_size if file.exists() else 0)

    _follow(monotonic, monkeypatch)


def late_once_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit passes between the arrival of all that a child says, to its end, and its reading."""
    late_s = 0.0
    select = parent.select

    class Poll:
        def __init__(self) -> None:
            self._poll, self._end = select.poll(), select.poll()

        def register(self, descriptor: int, events: int) -> None:
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for all of it
            self._poll.register(descriptor, events)
            self._end.register(descriptor, 0)

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            nonlocal late_s
            if arrived := self._poll.poll(timeout):
                self._end.poll()
                late_s = 1e6
            return arrived

    monkeypatch.setattr(parent, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    _follow(lambda: time.monotonic() + late_s, monkeypatch)


def _follow(monotonic: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
