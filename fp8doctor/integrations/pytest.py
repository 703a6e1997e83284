"""A pytest fixture: assert on a model in a test suite.

pytest loads this in every project that has fp8doctor installed, so torch is imported in the fixture.
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
    """Return a function that examines a model: ``fp8doctor(model, batch)``.

    The test fails for a finding at or above ``fail_on="error"``. ``require_fp8`` is that of
    `Report.raise_for`. Nothing is timed without ``trial=True``. The other options are those of
    ``fp8doctor.inspect_model``.
    """

    def examined(
        model: Any,
        batch: Any = None,
        *,
        fail_on: FailOn = "error",
        require_fp8: bool = False,
        trial: bool = False,
        **options: Any,
    ) -> Report:
        __tracebackhide__ = True
        from fp8doctor.api import inspect_model
        from fp8doctor.integrations.watching import check_fail_on

        check_fail_on(fail_on)
        report = inspect_model(model, batch, trial=trial, **options)
        report.raise_for(fail_on, require_fp8=require_fp8)
        return report

    return examined
