"""Facts recorded on real GPUs replay to what their patients must and must not have."""

import ast
from pathlib import Path
from typing import Any

import pytest

from research.record_patients import patients
from tests import recordings
from tests.recordings import files, name_of
from tests.replays import of, replayed

RECORDED = Path(__file__).parent / "patients" / "recorded"
RECORDINGS = files(RECORDED)
PATIENTS = {path.stem: path for path in patients()}


def expected(recording: Path) -> dict[str, Any]:
    """The module constants of the patient, read without running it: Transformer Engine's patients need a
    GPU."""
    constants: dict[str, Any] = {"MUST": (), "MUST_NOT": (), "SILENT": False}
    for node in ast.parse(PATIENTS[name_of(recording).partition("-")[2]].read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        name = getattr(targets[0], "id", None)
        if name in constants:
            constants[name] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    return constants


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_a_recording_replays_to_the_codes_of_its_patient(recording: Path) -> None:
    findings, must = replayed(recording).report.findings, expected(recording)
    found = {key for each in findings for key in (each.code, each.name)}
    assert set(must["MUST"]) <= found
    assert not set(must["MUST_NOT"]) & found
    grave = [each.title for each in findings if each.severity in ("warning", "error")]
    assert not grave or not must["SILENT"]


@pytest.mark.slow
def test_every_patient_was_recorded_and_the_pages_list_them() -> None:
    recorded = {name_of(path).partition("-")[2] for path in RECORDINGS}
    assert recorded == set(PATIENTS), "record it on a GPU, or add a job to research/matrix.py instead"
    assert not [path for folder in recordings.FOLDERS for path in folder.glob("*.json")]
    for folder in recordings.HEADS:
        assert (folder / "README.md").read_text("utf-8") == recordings.page(folder), (
            "python -m tests.recordings"
        )


@pytest.mark.parametrize("patient", ["decoder_468m", "llama_8b_float8"])
def test_compiling_comes_first_and_is_measured(patient: str) -> None:
    first = of("patients", f"h200-{patient}").report.prescription[0]
    assert (first.code, first.saving_ms.basis) == ("CMP001", "measured")
    assert first.saving_ms.low > 200


@pytest.mark.parametrize("patient", ["te_autocast", "te_fused", "accelerate_te"])
def test_transformer_engine_layers_are_recognised_and_engaged(patient: str) -> None:
    linears = of("patients", f"h200-{patient}").report.facts.network.linears
    te = [linear for linear in linears if linear.stack == "transformer_engine"]
    assert te
    assert all(linear.engaged for linear in te)
    assert {linear.recipe for linear in te} <= {"current", "delayed"}


def test_a_planted_layer_is_blamed_by_name() -> None:
    findings = of("patients", "h200-narrow_head").report.findings
    (finding,) = (each for each in findings if each.code == "SHP002")
    assert finding.evidence["first"] == "score"
    assert "score" in finding.explanation + finding.title


def test_the_founding_case_is_bound_by_casts_and_not_by_the_host() -> None:
    report = of("patients", "h200-decoder_468m").report
    assert report.answer.compared.parts_ms["casts"] == pytest.approx(283, abs=1)
    assert "STP001" not in {each.code for each in report.findings}
