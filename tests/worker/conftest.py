"""The worker as a fork."""

import subprocess
from types import SimpleNamespace

import pytest

from fp8doctor.worker import parent
from tests.worker.forked import Forked, server


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parent starts in this test is a fork."""
    server()
    stood_in = SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(parent, "subprocess", stood_in)
