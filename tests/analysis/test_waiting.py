"""The script's own step beside a copy of it that a trial timed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.analysis.waiting import script_overhead
from fp8doctor.diagnosis.verdict import verdict
from fp8doctor.facts.arm_names import ArmName
from tests.running.test_recorded import RECORDED

STARVED = load_report(RECORDED / "h200-te_loop_stopped.json.gz").facts
"""Its data workers took the host's cores."""


def test_what_the_script_loses_beside_its_model_is_told_first() -> None:
    assert verdict(trial_view(STARVED), ()).summary.startswith(
        "The script's own step takes 37.5 ms (30.5 to 59.7), a copy of it 22.7 ms: in the script the GPU is "
        "idle for 15.1 ms, and 93% of its gaps end with a kernel that was launched too late, as where data "
        "workers or logging hold the host's cores. FP8 does not shorten that. Fix it first. FP8 runs at "
    )


def test_a_script_that_was_not_profiled() -> None:
    seen = replace(STARVED, observed=replace(STARVED.observed, breakdown=None))
    assert "22.7 ms: the rest is what the script does besides." in script_overhead(seen)


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


def test_nothing_to_compare_with() -> None:
    arms = tuple(each for each in STARVED.trial.arms if each.name != ArmName.AS_IS)
    assert script_overhead(replace(STARVED, trial=replace(STARVED.trial, arms=arms))) == ""
    assert script_overhead(replace(STARVED, trial=replace(STARVED.trial, device="cpu"))) == ""


def test_an_even_script_is_told_nothing() -> None:
    even = load_report(RECORDED / "h200-eager_loop_timed_at_end.json.gz").facts
    assert script_overhead(even) == ""
