"""A build that takes longer than the trial has is given up: in the middle of a compilation where the process
is the trial's own, else between two cuts."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 1.0
"""Seconds after which it is raised again, where what it was raised in swallowed it, as a destructor does."""


class Overrun(BaseException):
    """The time of a build is over. No `Exception`: the compiler takes those for failures of its own."""


@contextmanager
def given_up(at: float, *, interrupts: bool) -> Iterator[None]:
    """Raise `Overrun` inside when the clock (``time.monotonic``) passes ``at``.

    Only in the main thread, where signals are handled, and only with ``interrupts``: a user's process has
    alarms of its own. What runs in C++ then is waited for.
    """
    in_time = at - time.monotonic()
    if not interrupts or math.isinf(at) or threading.current_thread() is not threading.main_thread():
        yield
        return

    armed = [True]

    def over(number: int, frame: FrameType | None) -> None:
        if armed:
            raise Overrun

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(in_time, 1e-3), AGAIN_S)
        yield
    finally:
        try:
            armed.clear()
        finally:  # the alarm may come before that
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
