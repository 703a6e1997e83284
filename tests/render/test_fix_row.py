"""Fix and its promise name one end, one basis and whole commands on every recorded screen."""

from __future__ import annotations

import pytest

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.diagnosis.dialects import from_table, tables
from fp8doctor.finding import Treatment


@pytest.mark.parametrize("name", tables())
def test_a_fix_that_ends_in_bf16_is_called_so(name: str) -> None:
    for treatment in tables()[name].get("in_bf16", {}):
        told = from_table(name, Treatment(name=treatment, summary="convert", code="pass"))
        assert told.name == STAY_IN_BF16
        assert "BF16" in told.summary
