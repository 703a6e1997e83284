"""A trial when the script has ended: what the script wrote and how it ended stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from fp8doctor.facts import recorded
from fp8doctor.running import observer as observing
from fp8doctor.running.examination import AskedToEnd, after_the_script, why_nothing_follows
from fp8doctor.running.observer import ScriptObserver
from fp8doctor.running.script_messages import WatchOptions
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard


@pytest.fixture
def registered(observer: ScriptObserver, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is to be called at the end; the trial itself is stood for by a note."""
    calls: list[object] = []
    monkeypatch.delattr(sys, "last_value", raising=False)  # pytest sets it where a test fails
    monkeypatch.setattr(observing, "call_at_end", calls.append)
    settings = WatchOptions("train.py", STEPS, WARMUP, stop=False, budget_s=1.0, device="cpu")
    observer.settings = observer.examination.settings = settings
    return calls


def train(steps: int = WARMUP + STEPS + PROFILED) -> None:
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(8, 16)).pow(2).mean().backward()
        optimizer.step()


def test_a_script_that_failed(
    observer: ScriptObserver, heard: Heard, registered: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    assert registered == [observer.time_at_end]
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    observer.time_at_end()
    assert heard.notes == [
        "copies of the model were not timed to the end: the script ended with an exception"
    ]
    assert not recorded(heard.facts, "trial")
    assert observer.job is None


def test_a_trial_that_is_interrupted(
    observer: ScriptObserver, heard: Heard, registered: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*given: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(observer.examination, "timed", timed)
    before = signal.getsignal(signal.SIGTERM)
    train()
    observer.time_at_end()
    assert heard.notes == ["copies of the model were not timed to the end: AskedToEnd: SIGTERM arrived"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_script_with_a_handler_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert why_nothing_follows() is None
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        assert why_nothing_follows() == ("the script handles SIGTERM itself, and may have been asked to end")
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def hangup_ends_a_process() -> Iterator[None]:
    """SIGHUP as a shell starts a program with it; nohup lets its processes ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_ends_a_process")
def test_what_is_written_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        print("by Python")
        os.write(1, b"by C\n")
        subprocess.run(["echo", "by a process"], check=True, timeout=60)
        signal.raise_signal(signal.SIGHUP)

    with pytest.raises(AskedToEnd), after_the_script():
        write()
    print("after")
    out, err = capfd.readouterr()
    assert out == "after\n"
    assert set(err.splitlines()) == {"by Python", "by C", "by a process"}
