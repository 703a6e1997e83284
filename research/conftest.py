"""The settings and fixtures of the gate's tests, for those that only nightly runs."""

from __future__ import annotations

import pytest

from tests import conftest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(conftest):
        config.pluginmanager.register(conftest)
