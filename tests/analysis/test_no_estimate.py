"""Every area of checks names what its change lacks in the cost model."""

from __future__ import annotations

from fp8doctor.analysis.no_estimate import LACKS
from fp8doctor.registry import discover


def test_every_area_names_what_the_cost_model_lacks() -> None:
    unnamed = [each.code for each in discover() if not {each.code, each.code[:3]} & LACKS.keys()]
    assert unnamed == []
