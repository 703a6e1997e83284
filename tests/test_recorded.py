"""Facts recorded on real GPUs replay to what their patients must and must not have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import tool
from fp8doctor.facts import recorded
from fp8doctor.facts.no_number import why_of
from fp8doctor.render.text import render
from fp8doctor.wording import in_times
from tests import recordings
from tests.patients.record import patients
from tests.recordings import files, name_of, text_of
from tests.render.every_format import hold_every_format

RECORDED = Path(__file__).parent / "patients" / "recorded"
RECORDINGS = files(RECORDED)
PATIENTS = {path.stem: path for path in patients()}


replayed = functools.cache(load_report)
"""The report on a recording, made once for all tests of it."""


def expected(recording: Path) -> dict[str, Any]:
    """The module constants of the patient, read without running it: Transformer Engine's patients need a
    GPU."""
    import ast

    source = PATIENTS[name_of(recording).partition("-")[2]].read_text("utf-8")
    constants: dict[str, Any] = {"MUST": (), "MUST_NOT": (), "HEALTHY": False}
    for node in ast.parse(source).body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name) and target.id in constants and node.value is not None:  # type: ignore[union-attr]
            constants[target.id] = ast.literal_eval(node.value)  # type: ignore[union-attr]
    return constants


def test_every_patient_was_recorded() -> None:
    recorded = {name_of(path).partition("-")[2] for path in RECORDINGS}
    assert recorded == set(PATIENTS), "record it on a GPU, or add a job to tests/matrix.py instead"


def test_every_recording_is_packed() -> None:
    assert not [path for folder in recordings.FOLDERS for path in folder.glob("*.json")], (
        "python -m tests.recordings"
    )


@pytest.mark.slow
def test_the_table_of_the_recordings_is_what_they_say() -> None:
    written = (RECORDED / "README.md").read_text("utf-8").splitlines()
    assert recordings.page(RECORDED).splitlines() == written, "python -m tests.recordings writes it again"


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_a_recording_replays_to_the_codes_of_its_patient(recording: Path) -> None:
    report, must = replayed(recording), expected(recording)
    found = {finding.code for finding in report.findings}
    assert set(must["MUST"]) <= found
    assert not set(must["MUST_NOT"]) & found
    assert not [outcome for outcome in report.outcomes if outcome.outcome == "crashed"]
    if must["HEALTHY"]:
        assert not [finding.title for finding in report.findings if finding.severity in ("warning", "error")]


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_the_speedup_of_a_recording_is_the_ratio_on_its_screens(recording: Path) -> None:
    report = replayed(recording)
    verdict = report.verdict
    if verdict.basis == "measured" and verdict.speedup and verdict.step_ms and verdict.bf16_step_ms:
        assert verdict.speedup == float(f"{verdict.bf16_step_ms:.1f}") / float(f"{verdict.step_ms:.1f}")
        assert f"FP8 runs at {verdict.speedup:.2f}x the speed of BF16" in verdict.summary
        if verdict.status in ("fp8_slower", "fp8_faster"):
            slower = verdict.status == "fp8_slower"
            shown = in_times(1 / verdict.speedup if slower else verdict.speedup)
            assert f"FP8 is {shown} {'slower' if slower else 'faster'}" in render(report)
        assert verdict.speedup_low is not None
        assert verdict.speedup_high is not None
        assert verdict.speedup_low <= verdict.speedup <= verdict.speedup_high
    if verdict.basis == "measured" and verdict.status == "no_fp8" and verdict.achievable_speedup:
        assert f"{verdict.achievable_speedup:.2f}x the speed of its best BF16" in verdict.summary


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_a_recording_names_its_gpu_and_versions(recording: Path) -> None:
    data = json.loads(text_of(recording))
    assert data["facts"]["gpus"][0]["name"].startswith("NVIDIA")
    assert data["facts"]["software"]["torch"]
    assert data["created_at"].startswith("20")


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_facts_come_back_as_they_were_recorded(recording: Path) -> None:
    data = json.loads(text_of(recording))
    assert replayed(recording).to_dict()["facts"] == data["facts"]
    assert data["tool"]["name"] == tool().name


@pytest.mark.slow
@pytest.mark.parametrize("recording", [path for path in RECORDINGS if '"arms"' in text_of(path)], ids=name_of)
def test_a_reason_in_other_words_changes_nothing(recording: Path) -> None:
    """Recordings of before have the sentence alone; a kind beside other words stands for it. An explanation
    may quote the words."""
    report = replayed(recording)
    trial = report.facts.trial
    arms = (replace(arm, why=why_of(arm), reason=arm.reason and "for another reason") for arm in trial.arms)
    trial = replace(trial, why=why_of(trial), arms=tuple(arms))
    found = diagnose(replace(report.facts, trial=trial))
    assert [replace(each, explanation="") for each in found.findings] == [
        replace(each, explanation="") for each in report.findings
    ]
    assert found.prescription == report.prescription
    assert found.verdict.status == report.verdict.status


def verdict(patient: str) -> Any:
    return replayed(RECORDED / f"h200-{patient}.json.gz").verdict


@pytest.mark.parametrize(
    ("patient", "status"),
    [
        ("decoder_468m", "fp8_slower"),
        ("decoder_454m", "fp8_slower"),
        ("llama_8b_float8", "fp8_slower"),
        ("llama_8b", "fp8_faster"),
        ("decoder_468m_compiled", "fp8_faster"),
        ("te_without_autocast", "fp8_not_engaged"),
    ],
)
def test_the_measured_verdicts(patient: str, status: str) -> None:
    assert verdict(patient).status == status


@pytest.mark.parametrize("patient", ["decoder_468m", "llama_8b_float8"])
def test_compiling_comes_first_and_is_measured(patient: str) -> None:
    first = replayed(RECORDED / f"h200-{patient}.json.gz").prescription[0]
    assert first.code == "CMP001"
    assert first.saving_ms is not None
    assert first.saving_ms.basis == "measured"
    assert first.saving_ms.low > 200


@pytest.mark.parametrize("patient", ["te_autocast", "te_fused", "accelerate_te"])
def test_transformer_engine_layers_are_recognised_and_engaged(patient: str) -> None:
    linears = replayed(RECORDED / f"h200-{patient}.json.gz").facts.network.linears
    te = [linear for linear in linears if linear.stack == "transformer_engine"]
    assert te
    assert all(linear.engaged for linear in te)
    assert {linear.recipe for linear in te} <= {"current", "delayed"}


@pytest.mark.parametrize(
    ("patient", "code", "evidence", "name"),
    [
        ("cast_heavy_layer", "STP002", "modules_with_most_casts", "frames"),
        ("narrow_head", "SHP004", "first", "score"),
        ("fp32_matmul", "STP004", "modules", "head"),
    ],
)
def test_a_planted_layer_is_blamed_by_name(patient: str, code: str, evidence: str, name: str) -> None:
    (finding,) = (
        each for each in replayed(RECORDED / f"h200-{patient}.json.gz").findings if each.code == code
    )
    blamed = finding.evidence[evidence]
    assert (blamed if isinstance(blamed, str) else blamed[0]) == name
    assert name in finding.explanation + finding.title


def test_the_founding_case_is_bound_by_casts_and_not_by_the_host() -> None:
    findings = {each.code: each for each in replayed(RECORDED / "h200-decoder_468m.json.gz").findings}
    assert findings["STP002"].evidence["casts_ms"] == pytest.approx(283, abs=1)
    assert "STP001" not in findings


LEAST_CLASSIFIED_PCT = 99.0
"""Of the time of the kernels. Of ViT, encoder-decoder and te_transformer no kernel was looked at to write a
rule; before Transformer Engine's names were taken over from te_fused and from the symbols of its library,
98.7 % of te_transformer's were known."""


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_what_every_kernel_does_is_known(recording: Path) -> None:
    facts = replayed(recording).facts
    profiled = [arm for arm in facts.arms() if recorded(arm, "breakdown") and arm.breakdown]
    for arm in profiled:
        assert arm.breakdown is not None
        assert 100 - arm.breakdown.unclassified_pct >= LEAST_CLASSIFIED_PCT
        assert sum(arm.breakdown.families_ms.values()) + arm.breakdown.idle_ms == pytest.approx(
            arm.step_ms, rel=0.01
        )
    if name_of(recording).partition("-")[2] in ("vit", "encoder_decoder", "te_transformer"):
        assert len(profiled) >= 2


def test_blocks_in_pieces_without_a_counted_break_name_the_usual_cause() -> None:
    (finding,) = (
        each for each in replayed(RECORDED / "h200-graph_breaks.json.gz").findings if each.code == "CMP003"
    )
    assert (finding.evidence["graph_breaks"], finding.evidence["graphs_run"]) == (0, 48)
    assert "a branch that depends on data" in finding.explanation


def test_one_missing_fact_is_told_with_its_reason() -> None:
    screen = " ".join(render(replayed(RECORDED / "h200-decoder_468m.json.gz"), verbose=True).split())
    assert "Not looked at: NUM002 (the weights are as an initialiser draws them," in screen


@pytest.mark.gate(
    "h200-decoder_468m",
    "h200-llama_8b",
    "h200-lora_fp32",
    "h200-moe",
    "h200-te_autocast",
    "h200-fsdp2_without_precompute",
    "h200-gpt2_conv1d",
    "h200-trained_outlier",
)
@pytest.mark.slow
@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_a_recording_is_sound_in_every_format(recording: Path) -> None:
    hold_every_format(replayed(recording))
