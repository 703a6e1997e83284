"""Waiting for what another thread or process does, with a bound."""

import time
from collections.abc import Callable

import pytest

LONGEST_S = 300.0
"""Seconds after which nothing is waited for any more. A choice: on two busy cores it takes a few."""


def comes_true(true: Callable[[], bool], within_s: float = LONGEST_S) -> bool:
    """Whether it comes true in time."""
    until = time.monotonic() + within_s
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(1e-2)
    return True


def wait_for(what: str, true: Callable[[], bool], within_s: float = LONGEST_S) -> None:
    """Wait until it comes true, and fail in a sentence that names ``what`` where it does not."""
    if not comes_true(true, within_s):
        pytest.fail(f"waited {within_s:g} s for {what}")
