"""Signals that arrive during a deferral reach their handlers, and the handlers are where they were."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from fp8doctor.signals import signals_deferred

NUMBERS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM)
"""With handlers of a script's own, as SIGINT has Python's."""


class Asked(BaseException):
    """What the handlers of a script raise."""


class Script:
    """A script whose handlers note what they are called for, and raise for some of it."""

    def __init__(self, raising: frozenset[signal.Signals]) -> None:
        self.raising = raising
        self.called: list[int] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.called.append(number)
        if number in self.raising:
            raise Asked(number)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    numbers = (*NUMBERS, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def restored(script: Script) -> bool:
    return all(signal.getsignal(number) == script.handle for number in (*NUMBERS, signal.SIGINT))


def test_each_of_several_is_called_where_one_raises() -> None:
    script = Script(frozenset({signal.SIGINT, signal.SIGTERM}))
    for number in (*NUMBERS, signal.SIGINT):
        signal.signal(number, script.handle)

    def block() -> None:
        with signals_deferred():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            assert script.called == []

    with pytest.raises(Asked) as caught:
        block()
    assert script.called == [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]
    assert caught.value.args == (signal.SIGTERM,)
    assert isinstance(caught.value.__context__, Asked)
    assert restored(script)


def test_a_signal_that_arrives_again_and_again_is_called_once() -> None:
    """A profiler of the script's sends a hundred a second, and an examination takes seconds."""
    script = Script(frozenset())
    signal.signal(signal.SIGUSR1, script.handle)
    with signals_deferred():
        for _ in range(3000):
            signal.raise_signal(signal.SIGUSR1)
    assert script.called == [signal.SIGUSR1]
