"""Plans from the times of a saved report."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8doctor
from fp8doctor import load_report
from fp8doctor.facts import Arm
from research.benchmarks.recorded_steps import JOBS, PATIENTS

LLAMA = PATIENTS / "h200-llama_8b_float8.json.gz"


def arms(path: Path) -> dict[str, Arm]:
    return {each.name: each for each in load_report(path).facts.trial.arms if each.get("step_ms")}


def test_the_gpu_of_the_report_gets_the_measured_times() -> None:
    plan, timed = fp8doctor.plan(str(LLAMA), "H200"), arms(LLAMA)
    tensorwise = next(each for each in plan.rows if each.recipe == "tensorwise" and each.compiled)
    assert tensorwise.bf16_step_ms == pytest.approx(timed["bf16_compiled"].step_ms, rel=1e-3)
    assert tensorwise.step_ms == pytest.approx(timed["prescribed"].step_ms, rel=1e-3)
    assert {each.recipe for each in plan.rows if each.basis == "measured"} == {"tensorwise"}
    assert plan.notes == ("Scaled from the times that the report measured on NVIDIA H200.",)


def test_another_gpu_gets_them_scaled() -> None:
    plan = fp8doctor.plan(str(LLAMA), ["H200", "B200"])
    rows = {each.gpu: each for each in plan.rows if each.recipe == "tensorwise" and each.compiled}
    assert rows["B200"].basis == "modelled"
    assert 1.5 < rows["H200"].bf16_step_ms / rows["B200"].bf16_step_ms < 2.3


def test_a_bf16_job_whose_conversions_were_timed() -> None:
    path = JOBS / "h200-llama_3b_bf16.json.gz"
    timed = arms(path)
    rows = {each.recipe: each for each in fp8doctor.plan(str(path), "H200").rows if each.compiled}
    for recipe in ("tensorwise", "rowwise"):
        assert rows[recipe].step_ms == pytest.approx(timed[f"float8_{recipe}"].step_ms, rel=1e-3)
        assert rows[recipe].basis == "measured"
