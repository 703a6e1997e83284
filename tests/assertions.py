"""Fail a test that passes without reaching an assertion or an expected exception: it protects nothing.

pytest rewrites each assertion of a test so that it can report that it passed (``enable_assertion_pass_hook``
in setup.cfg). It asks first whether anybody listens. The answer here is no, which saves the report, and the
question is counted.
"""

import os
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
from _pytest.assertion import rewrite

reached = 0


def count() -> bool:
    """Count an assertion, unless it is one of fp8doctor's own: pytest rewrites these too, as of a plugin."""
    global reached
    reached += not sys._getframe(1).f_globals.get("__name__", "").startswith("fp8doctor")
    return False


def counted(expect: Callable[..., Any]) -> Callable[..., Any]:
    def expected(*args: Any, **named: Any) -> Any:
        count()
        return expect(*args, **named)

    return expected


rewrite._check_if_assertion_pass_impl = count
rewrite.PYC_TAIL = (
    f"-counted{rewrite.PYC_TAIL}"  # pytest keeps what it rewrote, and it rewrites otherwise now
)
pytest.register_assert_rewrite("tests", "research")
for name in ("raises", "warns", "deprecated_call"):
    setattr(pytest, name, counted(getattr(pytest, name)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = reached
    result = yield
    if reached == before and not os.environ.get("UPDATE_GOLDEN"):  # a test may write its page instead
        pytest.fail("it passed without reaching an assertion or an expected exception", pytrace=False)
    return result
