"""Where FP8 is neither faster nor slower, the screen says what memory it saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor.analysis.plan_end import gib_saved_at_no_cost, is_in_fp8
from fp8doctor.facts import Arm, Trial
from fp8doctor.render.box import answer
from fp8doctor.report import load_report
from tests.diagnosis.test_plan_agrees import EVERY, replayed
from tests.diagnosis.trials import Of
from tests.test_recorded import RECORDED

JOBS = RECORDED.parents[1] / "benchmarks" / "recorded"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (JOBS / "h200-moe", "the fastest FP8 that was timed is only about as fast (87.2 vs 86.6 ms)."),
        (JOBS / "h200-vit_h14", "(153.2 vs 149.6 ms), and takes 7.3 GiB less if memory is short."),
    ],
    ids=["moe, with 0.24 GiB less", "vit_h14"],
)
def test_a_plan_in_bf16_names_the_fp8_that_is_as_fast_and_leaner(path: object, told: str) -> None:
    assert answer(load_report(f"{path}.json.gz")).fix[0].endswith(told)


@EVERY
def test_a_job_in_fp8_stays_in_it_if_that_is_as_fast_and_leaner(path: Path) -> None:
    """Whether it is that fast now or with its fixes."""
    report, _, view = replayed(path)
    if view.end is None or not view.end.in_bf16 or not view.uses_fp8:
        return
    for each in report.facts.trial.arms:
        if each.tried and each.get("peak_gib") and is_in_fp8(each):
            slower = (each.step_ms or 0.0) > (view.end.arm.step_ms or 0.0)
            assert slower or not gib_saved_at_no_cost(view.end.arm, each, report.facts.trial)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        (JOBS / "h100-flux_like", "FP8 is about as fast as BF16; it saves 1.5 GiB"),
        (RECORDED / "h200-graph_breaks", "FP8 is about as fast as BF16; it saves 4.5 GiB"),
        (RECORDED / "h100-te_llama_7b", "FP8 is about as fast as BF16"),
    ],
    ids=["flux_like", "graph_breaks", "te_llama_7b takes more"],
)
def test_an_even_verdict_says_what_fp8_saves(path: object, what: str) -> None:
    report = load_report(f"{path}.json.gz")
    assert report.verdict.status == "fp8_even"
    assert answer(report).what == what


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
