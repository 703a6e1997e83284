"""Where FP8 is neither faster nor slower, the screen says what memory it saves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor.analysis.plan_end import gib_saved_at_no_cost
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.facts import Arm, Trial
from fp8doctor.report import load_report
from tests.diagnosis.trials import Of
from tests.test_recorded import RECORDED

JOBS = RECORDED.parents[1] / "benchmarks" / "recorded"


@pytest.mark.parametrize(
    ("path", "gib"),
    [
        (JOBS / "h100-flux_like", 1.5),
        (RECORDED / "h200-graph_breaks", 4.5),
        (RECORDED / "h100-te_llama_7b", 0.0),
    ],
    ids=["flux_like", "graph_breaks", "te_llama_7b takes more"],
)
def test_what_fp8_saves_in_memory_is_an_answer_to_an_even_verdict(path: object, gib: float) -> None:
    report = load_report(f"{path}.json.gz")
    view = trial_view(report.facts)
    assert report.verdict.status == "fp8_even"
    assert gib_saved_at_no_cost(view.bf16, view.as_is, view.facts.trial) == pytest.approx(gib, abs=0.06)


def step(ms: float, gib: float) -> Arm:
    rounds = tuple(ms * part for part in (0.997, 0.999, 1.0, 1.001, 1.003))
    return replace(Of({}).arm("as_is", rounds), peak_gib=gib)


GIB = st.floats(1.0, 140.0)


@given(ms=st.floats(1.0, 2000.0), speed=st.floats(0.5, 2.0), bf16_gib=GIB, fp8_gib=GIB)
def test_memory_is_an_answer_only_to_a_tie(ms: float, speed: float, bf16_gib: float, fp8_gib: float) -> None:
    trial = Trial(device="cuda", reliable=True, self_check_ratio=1.0)
    saved = gib_saved_at_no_cost(step(ms * speed, bf16_gib), step(ms, fp8_gib), trial)
    assert saved in (0.0, bf16_gib - fp8_gib)
    assert saved >= 0
    if abs(speed - 1) > 0.03:
        assert saved == 0
    elif abs(speed - 1) < 0.019 and ms > 10 and bf16_gib - fp8_gib > 1.5:
        assert saved
