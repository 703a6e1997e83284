"""A clock for the parent's limits, so that no test waits for one or depends on how fast this machine is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8doctor.worker import parent


def late_once_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit has passed as soon as the child wrote this file."""
    monkeypatch.setattr(
        parent,
        "time",
        SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * file.exists(), sleep=time.sleep),
    )
