"""A fixture for pytest: a test suite asserts on a model.

pytest loads this at its start, in every project that has fp8doctor installed: torch is imported when a test
calls the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fp8doctor.integrations.watching import FailOn
    from fp8doctor.report import Report


@pytest.fixture(scope="session")
def fp8doctor() -> Callable[..., Report]:
    """``fp8doctor(model, batch)`` examines a model, and fails the test where something is as grave as
    ``fail_on="error"``; with ``require_fp8=True`` also when no layer trains in FP8, or that cannot be told.

    Nothing is timed without ``trial=True``. Further options are those of ``fp8doctor.inspect_model``.
    """
    return examined


def examined(
    model: Any,
    batch: Any = None,
    *,
    fail_on: FailOn = "error",
    require_fp8: bool = False,
    trial: bool = False,
    **options: Any,
) -> Report:
    """Examine a model; raise `ReportFailed` where something is as grave as ``fail_on``, or if FP8 is required
    and no layer trains in it."""
    __tracebackhide__ = True
    from fp8doctor.api import inspect_model
    from fp8doctor.integrations.watching import check_fail_on, hold

    check_fail_on(fail_on)
    report = inspect_model(model, batch, trial=trial, **options)
    hold(report, fail_on, require_fp8)
    return report
