"""The script's own step beside a copy of it that a trial timed."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.watched import script_overhead, waiting_first

RECORDED = Path(__file__).parents[1] / "running" / "recorded"

STARVED = load_report(RECORDED / "h200-te_loop_stopped.json.gz").facts
"""Its data workers took the host's cores."""


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({"steps_ms": (24.0,) * 10}, id="as long as the copy"),
        pytest.param({"steps_ms": (22.0, 90.0) * 5}, id="its steps scatter"),
        pytest.param({"before_forward_ms": (13.0,) * 10}, id="it waits before the forward, which is told"),
        pytest.param({"clock": "host"}, id="the host's clock"),
    ],
)
def test_a_script_that_loses_nothing_of_its_own(seen: dict[str, Any]) -> None:
    assert script_overhead(replace(STARVED, observed=replace(STARVED.observed, **seen))) == ""


def test_what_a_cpu_computes_before_the_model_is_no_wait_of_a_gpu() -> None:
    seen = replace(STARVED.observed, steps_ms=(24.0,) * 10, before_forward_ms=(13.0,) * 10)
    assert waiting_first(replace(STARVED, observed=seen))
    assert waiting_first(replace(STARVED, observed=replace(seen, clock="host"))) == ""
