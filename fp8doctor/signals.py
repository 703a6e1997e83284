"""Signals that arrive where what their handlers raise would be lost, or be taken for ours."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = signal.valid_signals()


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Call the handlers of signals when the block has ended, so that what they raise comes out of it.

    Only the main thread runs handlers. Signals without a handler in Python do what they always do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append((number, frame))

    own: dict[int, Callable[..., Any]] = {}
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            own[number] = handler
            signal.signal(number, note)
    try:
        yield
    finally:
        for deferred, handler in own.items():
            if signal.getsignal(deferred) is note:
                signal.signal(deferred, handler)
        for each, frame in arrived:
            own[each](each, frame)
