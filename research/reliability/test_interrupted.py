"""An interrupt costs nothing of the user's, single or double, whatever moment of the put-back it comes at."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fp8doctor
from fp8doctor.loading.job import Job
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.settings import restored
from research.reliability.everything import differences, everything, settings
from tests.trial.reach import trained

pytestmark = pytest.mark.slow

ROOT = Path(fp8doctor.__file__).parent

FILES = {
    str(ROOT / "signals.py"),
    *(str(ROOT / "trial/state" / f"{name}.py") for name in ("settings", "users", "guard")),
}
"""What puts back. The settings are left out, whose many lines run in the middle of it."""

Event = tuple[str, int]
"""File and line."""


@contextmanager
def interrupted(at: int | None) -> Iterator[list[Event]]:
    """Send SIGINT at the event of this number, a call or a line in `FILES`; yield a list of the events."""
    events: list[Event] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event in ("call", "line"):  # Python calls no handler while a function returns
            events.append((frame.f_code.co_filename, frame.f_lineno))
            if len(events) - 1 == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield events
    finally:
        sys.settrace(before)


def a_trial(job: Job, at: int | None, *, twice: bool) -> list[Event]:
    """Do what a trial does to the user's things, interrupted at this event, and before the put-back with
    ``twice``. Return the events."""
    guard = Guard(job)
    with interrupted(at) as events, suppress(KeyboardInterrupt), restored(job, guard):
        for parameter in job.model.parameters():
            parameter.grad = None
        job.model.eval()
        job.model.first.register_forward_hook(lambda *arguments: None)
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        if twice:
            raise KeyboardInterrupt
    return events


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_an_interrupt_at_any_line_loses_nothing(twice: bool) -> None:
    job = trained()
    gradients = [parameter.grad for parameter in job.model.parameters()]
    before, mine = settings(), everything(job.model, job.optimizer, job.batch)
    events = a_trial(job, None, twice=twice)
    first = {event: number for number, event in reversed(list(enumerate(events)))}
    assert len(first) > 100
    for event, at in first.items():
        assert a_trial(job, at, twice=twice)[at] == event
        now = [parameter.grad for parameter in job.model.parameters()]
        assert all(a is b for a, b in zip(now, gradients, strict=True)), event
        assert (event, differences(mine, everything(job.model, job.optimizer, job.batch))) == (event, [])
        assert (event, differences(before, settings())) == (event, [])
