"""Plans from the times of a saved report."""

from pathlib import Path

import pytest

import fp8doctor
from fp8doctor import load_report
from fp8doctor.cost.step_cost import modelled_step
from research.benchmarks.recorded_steps import JOBS, PATIENTS


@pytest.mark.parametrize(
    ("path", "fp8"),
    [
        (PATIENTS / "h200-llama_8b_float8.json.gz", "prescribed"),
        (JOBS / "h200-llama_3b_bf16.json.gz", "float8_tensorwise"),
    ],
)
def test_a_plan_is_scaled_to_the_measured_bf16_on_any_gpu(path: Path, fp8: str) -> None:
    timed = {each.name: each for each in load_report(path).facts.trial.arms if each.get("step_ms")}
    plan = fp8doctor.plan(str(path), ["H200", "B200"])
    rows = {each.gpu: each for each in plan.rows if each.recipe == "tensorwise"}
    assert rows["H200"].bf16_step_ms == pytest.approx(timed["bf16_compiled"].step_ms, rel=1e-3)
    assert rows["H200"].step_ms == pytest.approx(timed[fp8].step_ms, rel=0.05)
    assert 1.5 < rows["H200"].bf16_step_ms / rows["B200"].bf16_step_ms < 2.3
    assert any(note.startswith("All times are scaled") for note in plan.notes)


@pytest.mark.parametrize("name", ["h200-te_checkpointed", "h200-te_checkpointed_inside"])
def test_a_plan_refuses_the_steps_that_a_report_refuses(name: str) -> None:
    path = PATIENTS / f"{name}.json.gz"
    facts = load_report(path).facts
    own = {each.recipe for each in facts.network.fp8}
    rows = [each for each in fp8doctor.plan(str(path), "H200", stack="te").rows if each.recipe in own]
    assert rows
    assert all((each.step_ms is None) == (modelled_step(facts) is None) for each in rows)
