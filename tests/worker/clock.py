"""A clock for the parent's limits, so that no test waits for one or depends on how fast this machine is."""

from __future__ import annotations

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


def _follow(monotonic: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
