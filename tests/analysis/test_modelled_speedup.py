"""What is expected of a step that nobody timed, held to trials of the same jobs on an H200."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fp8doctor import load_report
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.cost.matmul_counts import without_checkpointing
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.expected_verdict import expected_speedup, expected_verdict
from fp8doctor.diagnosis.measured_verdict import measured_verdict
from fp8doctor.facts import Facts
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding
from fp8doctor.registry import discover, run
from fp8doctor.render import box
from fp8doctor.render.text import render
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
    expects, verdict = modelled_speedup(facts), measured_verdict(trial_view(facts))
    assert expects is not None
    assert verdict is not None
    assert verdict.speedup == pytest.approx(expects.as_is, rel=MODEL_ERROR)
    assert verdict.achievable_speedup == pytest.approx(max(expects.as_is, expects.compiled), rel=MODEL_ERROR)


@pytest.mark.parametrize("name", ["te_fused", "te_autocast", "accelerate_te"])
def test_nothing_is_promised_of_compiling_what_is_not_torchaos(name: str) -> None:
    expects = modelled_speedup(examined(name)[0])
    assert expects is not None
    assert expects.compiled == expects.as_is
    assert "compiled" not in expects.sentence


@pytest.mark.slow
@pytest.mark.parametrize(("name", "clear"), [("vit_large", False), ("decoder_350m", True)])
def test_slower_fp8_that_is_only_modelled_is_not_called_fine(name: str, clear: bool) -> None:
    recorded_facts = load_report(RECORDED / f"h200-{name}.json.gz").facts
    report = diagnose(msgspec.structs.replace(recorded_facts, trial=NOT_RECORDED))
    assert report.verdict.basis == "modelled"
    assert report.verdict.achievable_speedup is not None
    assert (report.verdict.achievable_speedup >= 1) == clear
    render(msgspec.structs.replace(report, findings=(), prescription=()))


@pytest.mark.parametrize("name", ["hidden_te", "nf4_base"])
def test_nothing_is_expected_of_layers_that_the_fix_changes(name: str) -> None:
    verdict = expected_verdict(*examined(name))
    assert (verdict.basis, verdict.achievable_speedup) == (None, None)


@pytest.mark.parametrize("name", ["compile_disabled", "llama_kv_cache"])
def test_what_is_not_what_it_seems_is_expected_once_it_is_fixed(name: str) -> None:
    verdict = diagnose(recorded_steps.without_trial(examined(name)[0])).verdict
    assert verdict.estimated_speedup is None
    assert verdict.achievable_speedup is not None


def test_the_step_with_the_fix_is_near_the_measured_one() -> None:
    facts = load_report(RECORDED / "h200-te_without_autocast.json.gz").facts
    times = {arm.name: arm.step_ms or 0.0 for arm in facts.trial.arms if arm.tried}
    report = diagnose(recorded_steps.without_trial(facts))
    expects = expected_speedup(report.facts, report.findings)
    assert expects is not None
    assert expects.best == pytest.approx(times["bf16_compiled"] / times["prescribed"], rel=0.05)
    assert expects.range in box.answer(report).sure


def test_what_the_host_takes_to_recompute_is_said_to_be_unknown() -> None:
    """FP8 was 2.2 times as slow as BF16 here, and 1.2 times as slow without checkpointing."""
    facts = load_report(RECORDED / "h200-te_checkpointed_inside.json.gz").facts
    report = diagnose(recorded_steps.without_trial(facts))
    expects = modelled_speedup(report.facts)
    assert expects is not None
    assert (expects.as_is, expects.after) == (None, "without checkpointing")
    assert not expects.wins


def test_a_forward_that_recomputes_layers_that_nobody_saw_is_taken_to_recompute_all() -> None:
    facts = load_report(RECORDED / "h200-te_own_checkpoint.json.gz").facts
    untimed = recorded_steps.without_trial(facts)
    expects, kept = modelled_speedup(untimed), modelled_speedup(without_checkpointing(untimed))
    assert expects is not None
    assert kept is not None
    measured = measured_verdict(trial_view(facts))
    assert measured is not None
    assert expects.as_is == pytest.approx(measured.speedup, rel=0.05)
    assert expects.best == pytest.approx(kept.best, rel=0.02)


def test_uncompiled_casts_of_more_rows_than_were_measured_are_said_to_be_unknown() -> None:
    """FP8 was 1.78 times as slow as BF16 here, and 1.42 times was told."""
    facts = load_report(RECORDED / "h200-cast_heavy_layer.json.gz").facts
    untimed = recorded_steps.without_trial(facts)
    verdict = diagnose(untimed).verdict
    assert (verdict.basis, verdict.estimated_speedup) == ("modelled", None)
    times = {arm.name: arm.step_ms or 0.0 for arm in facts.trial.arms}
    measured = times["bf16_compiled"] / times["prescribed"]
    assert verdict.achievable_speedup == pytest.approx(measured, rel=0.05)


def test_a_recompute_that_leaves_fp8_is_not_modelled_as_fp8() -> None:
    facts, findings = examined("te_checkpointed")
    assert "CKP002" in {each.code for each in findings}
    assert "modelled" not in expected_verdict(facts, findings).summary


@pytest.mark.slow
def test_what_a_forward_of_the_users_own_computes_is_said_to_be_unknown() -> None:
    facts, findings = examined("decoder_468m_compiled")
    linears = tuple(
        msgspec.structs.replace(each, features={**each.features, "own_forward": True})
        for each in facts.network.linears
    )
    rotated = msgspec.structs.replace(
        facts, network=msgspec.structs.replace(facts.network, linears=linears), trial=NOT_RECORDED
    )
    verdict = expected_verdict(rotated, findings)
    assert verdict.basis is None


@pytest.mark.slow
def test_the_verdict_says_that_it_is_modelled_and_on_which_gpu() -> None:
    facts, findings = examined("decoder_468m")
    verdict = expected_verdict(facts, findings)
    assert (verdict.status, verdict.basis) == ("not_measured", "modelled")
    assert verdict.speedup is None
    assert verdict.achievable_speedup == pytest.approx(1.04, abs=0.01)
