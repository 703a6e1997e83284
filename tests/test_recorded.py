"""Facts recorded on real GPUs replay to what their patients must and must not have."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from fp8doctor import load_report
from tests import recordings
from tests.patients.record import patients
from tests.recordings import files, name_of
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
    constants: dict[str, Any] = {"MUST": (), "MUST_NOT": (), "SILENT": False}
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
    found = {key for each in report.findings for key in (each.code, each.name)}
    assert set(must["MUST"]) <= found
    assert not set(must["MUST_NOT"]) & found
    assert not [outcome for outcome in report.outcomes if outcome.outcome == "crashed"]
    if must["SILENT"]:
        assert not [finding.title for finding in report.findings if finding.severity in ("warning", "error")]


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
        ("narrow_head", "SHP002", "first", "score"),
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
    report = replayed(RECORDED / "h200-decoder_468m.json.gz")
    assert report.answer.compared.parts_ms["casts"] == pytest.approx(283, abs=1)
    assert "STP001" not in {each.code for each in report.findings}


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
