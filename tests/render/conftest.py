"""The screens do not depend on which checks are installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fp8doctor import registry
from tests.render.reports import AREA_OF, SCREENS


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {outcome.code for report in SCREENS.values() for outcome in report.outcomes}
    monkeypatch.setattr(
        registry,
        "discover",
        lambda: [
            SimpleNamespace(code=code, area=AREA_OF[code[:3]], explained_by=()) for code in sorted(codes)
        ],
    )
