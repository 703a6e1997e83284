"""Defer signals while an exception from a handler would be lost or misattributed."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = signal.valid_signals()


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Call signal handlers after the block, so their exceptions propagate from it.

    Only the main thread runs handlers. Signals without a Python handler act immediately. Repeated arrivals of
    one signal call its handler once, as during C code.
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
            finally:  # if one raises, the others still run, as in Python
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
                put_back()  # a restored handler may have raised in the first call
            finally:
                deferring = False
                call()
