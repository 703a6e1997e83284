"""An observer of steps in this process, and what it tells."""

import gc
from collections.abc import Iterator

import pytest

from fp8doctor.facts import Facts
from fp8doctor.running.observer import ScriptObserver
from fp8doctor.running.script_messages import Message, WatchOptions

WARMUP, STEPS = 2, 3
PROFILED = 2
"""Steps after the window until one of them is profiled."""


class Heard:
    """Stands in for the channel: keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def facts(self) -> Facts:
        return Facts.from_dict([each.facts for each in self.messages if each.facts is not None][-1])

    @property
    def notes(self) -> list[str]:
        return [each.note for each in self.messages if each.note is not None]


MANY = 100_000
"""Objects alive that an observer goes through for a second. What a test imports stays alive after it."""


@pytest.fixture(autouse=True)
def _little_to_go_through() -> None:
    if len(gc.get_objects()) > MANY:
        gc.collect()
        gc.freeze()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def stop_on_nan() -> bool:
    return False


@pytest.fixture
def observer(heard: Heard, stop_on_nan: bool) -> Iterator[ScriptObserver]:
    settings = WatchOptions(
        "train.py", STEPS, WARMUP, stop=False, budget_s=None, device=None, stop_on_nan=stop_on_nan
    )
    observer = ScriptObserver(heard.send, settings)
    observer.install()
    yield observer
    observer.handle.remove()
    observer.release()
