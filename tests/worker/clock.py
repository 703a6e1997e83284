"""A clock for the parent's limits, so that no test waits for one or depends on how fast this machine is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8doctor.worker import parent


def late_once_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit has passed as soon as the child wrote this file, and again whenever the file grows."""

    def monotonic() -> float:
        written = 1 + file.stat().st_size if file.exists() else 0
        return time.monotonic() + 1e6 * written

    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
