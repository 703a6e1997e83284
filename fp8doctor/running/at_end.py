"""When the script is over: its losses and weights are out, and copies of the model may be timed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType

ENDS = ("SIGTERM", "SIGHUP")
"""Signals that ask a process to end."""


class AskedToEnd(BaseException):
    """A signal arrived that would have found the script ended already."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} arrived")


def call_at_end(function: Callable[[], None]) -> None:
    """Have it called when the main thread is done.

    The functions of `atexit` come later: what torch.compile needs, threads and their executors, is gone then.
    """
    for executors in ("thread", "process"):  # they register their own ends; what came last is called first
        importlib.import_module(f"concurrent.futures.{executors}")
    threading._register_atexit(function)  # type: ignore[attr-defined]


def why_nothing_follows() -> str | None:
    """Tell why nothing of ours may follow this script; None where it ended well, as far as that can be told.

    Python does not tell the code that ``sys.exit`` was given.
    """
    if getattr(sys, "last_value", None) is not None:
        return "the script ended with an exception"
    if callable(signal.getsignal(signal.SIGTERM)):
        return "the script handles SIGTERM itself, and may have been asked to end"
    return None


@contextmanager
def after_the_script() -> Iterator[None]:
    """Write to stderr what would go to stdout, and end by an exception what would end by a signal, so that
    output and exit code stay the script's."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in ENDS}

    def end(number: int, frame: FrameType | None) -> None:
        raise AskedToEnd(number)

    for name in ENDS:
        signal.signal(getattr(signal, name), end)
    try:
        with _stdout_to_stderr(), redirect_stdout(sys.stderr):
            yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    kept = -1
    with suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        yield
    finally:
        if kept >= 0:
            os.dup2(kept, 1)
            os.close(kept)
