"""End code that has no time left, even while it compiles."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.05
"""Seconds until the alarm comes again, because it was deferred or a destructor swallowed `Overrun`."""

UNSAFE = frozenset({"__enter__", "__exit__", "__torch_dispatch__", "__torch_function__"})
"""Functions that an exception must not leave: it keeps a mode of torch on, so later steps raise, or ends the
process in a C++ destructor (compilations that were interrupted at random, torch 2.13, a CPU)."""


class Overrun(BaseException):
    """No time is left. No `Exception`: the compiler, or user code, would catch it."""


@contextmanager
def abort_after(at: float, *, interrupts: bool) -> Iterator[None]:
    """Raise `Overrun` inside when the clock passes ``at``, even while compiling.

    Only in the main thread, which handles signals, and only with ``interrupts``: a user's process has alarms
    of its own. A call into C++ ends first, an `UNSAFE` function too, and what cleans up after `Overrun`.
    """
    in_time = at - time.monotonic()
    if not interrupts or math.isinf(at) or threading.current_thread() is not threading.main_thread():
        yield
        return

    armed = [True]

    def over(number: int, frame: FrameType | None) -> None:
        if armed and not _cleans_up() and UNSAFE.isdisjoint(_callers(frame)):
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


def _callers(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def _cleans_up() -> bool:
    """Return whether an `Overrun` is on its way out."""
    error = sys.exception()
    while error is not None and not isinstance(error, Overrun):
        error = error.__context__
    return error is not None
