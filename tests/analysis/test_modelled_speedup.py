"""What is expected of a step that nobody timed, held to trials of the same jobs on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8doctor import load_report
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.matmul_counts import without_checkpointing
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.estimate import expected_speedup
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding
from fp8doctor.registry import discover, run
from tests.benchmarks import recorded_steps

RECORDED = Path(__file__).parents[1] / "patients" / "recorded"

MODEL_ERROR = 0.15
"""How far the modelled speedup of these jobs may be off; `tests/test_cost.py` holds that of all recordings to
it."""


def examined(name: str) -> tuple[Facts, tuple[Finding, ...]]:
    facts = load_report(RECORDED / f"h200-{name}.json.gz").facts
    return facts, run(discover(), facts)[0]


@pytest.mark.parametrize(
    "name",
    [
        "decoder_468m",
        "decoder_454m",
        "decoder_468m_compiled",
        "llama_8b_float8",
        "llama_8b",
        "te_fused",
        "checkpointed_needlessly",
    ],
)
def test_the_expected_speedup_is_near_the_measured_one(name: str) -> None:
    facts, _ = examined(name)
    expects, view = modelled_speedup(facts), TrialView(facts)
    assert expects is not None
    assert view.speedup.median == pytest.approx(expects.as_is, rel=MODEL_ERROR)
    best = view.bf16_of_fp8.step_ms / view.fp8.step_ms
    assert best == pytest.approx(max(expects.as_is, expects.compiled), rel=MODEL_ERROR)


@pytest.mark.parametrize("name", ["hidden_te", "nf4_base"])
def test_nothing_is_expected_of_layers_that_the_fix_changes(name: str) -> None:
    assert expected_speedup(*examined(name)) is None


@pytest.mark.parametrize("name", ["compile_disabled", "llama_kv_cache"])
def test_what_is_not_what_it_seems_is_expected_once_it_is_fixed(name: str) -> None:
    verdict = diagnose(recorded_steps.without_trial(examined(name)[0])).verdict
    assert verdict.estimated_speedup is None
    assert verdict.achievable_speedup is not None


def test_a_forward_that_recomputes_layers_that_nobody_saw_is_taken_to_recompute_all() -> None:
    facts = load_report(RECORDED / "h200-te_own_checkpoint.json.gz").facts
    untimed = recorded_steps.without_trial(facts)
    expects, kept = modelled_speedup(untimed), modelled_speedup(without_checkpointing(untimed))
    assert expects is not None
    assert kept is not None
    assert expects.as_is == pytest.approx(TrialView(facts).speedup.median, rel=0.05)
    assert expects.best == pytest.approx(kept.best, rel=0.02)
