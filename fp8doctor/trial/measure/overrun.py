"""Give up a build whose time is over."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 1.0
"""Seconds after which `Overrun` is raised again, because a destructor can swallow it."""


class Overrun(BaseException):
    """A build has no time left. No `Exception`: the compiler would catch it."""


@contextmanager
def given_up(at: float, *, interrupts: bool) -> Iterator[None]:
    """Raise `Overrun` inside when the clock passes ``at``, even while compiling.

    Only in the main thread, which handles signals, and only with ``interrupts``: a user's process has alarms
    of its own. A call into C++ ends first.
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
