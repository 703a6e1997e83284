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

    Only the main thread runs handlers. Signals without a handler in Python do what they always do. Of several
    arrivals of one signal the handler is called once, as while C code runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own: dict[int, Callable[..., Any]] = {}
    arrived: dict[int, FrameType | None] = {}
    deferring = True

    def note(number: int, frame: FrameType | None) -> None:
        if deferring:
            arrived.setdefault(number, frame)
        else:
            own[number](number, frame)

    def put_back() -> None:
        for number, handler in own.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    def call() -> None:
        while arrived:
            number = min(arrived)
            try:
                own[number](number, arrived.pop(number))
            finally:  # the others are called where one raises, as Python does
                call()

    try:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, signal.Handlers):
                own[number] = handler
                signal.signal(number, note)
        yield
    finally:
        try:
            put_back()
        finally:
            try:
                put_back()  # a handler that was back may have raised in the first
            finally:
                deferring = False
                call()
