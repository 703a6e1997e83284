"""``tests/benchmarks/padded_vocabulary.py`` trains the patient with both vocabularies on the same tokens, and
sets what it measured beside what SHP008 models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torchao.float8.float8_linear import Float8Linear

from fp8doctor import load_report
from tests.benchmarks import padded_vocabulary, plain_step

TOKENS = torch.arange(32).view(2, 16)


@pytest.fixture(autouse=True)
def _no_patient_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = sys.modules.get(padded_vocabulary.PATIENT.stem)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop(padded_vocabulary.PATIENT.stem, None)
    if before:
        sys.modules[padded_vocabulary.PATIENT.stem] = before


@pytest.fixture
def patient() -> ModuleType:
    return plain_step.loaded(padded_vocabulary.PATIENT)


def test_gpt_2s_vocabulary_is_padded_as_the_check_says() -> None:
    (finding,) = load_report(padded_vocabulary.RECORDED, select=("SHP008",)).findings
    assert finding.treatment is not None
    assert f"from 50257 to {padded_vocabulary.padded(50257)}," in finding.treatment.summary
    assert padded_vocabulary.padded(50304) == 50304


@pytest.mark.parametrize(
    ("variant", "fp8", "compiled"),
    [("bf16_compiled", 0, 1), ("compile-blocks", 5, 1), ("as_is", 5, 0)],
)
def test_only_the_vocabulary_of_the_patient_changes(
    patient: ModuleType, variant: str, fp8: int, compiled: int
) -> None:
    assert variant in padded_vocabulary.VARIANTS.values()
    job = padded_vocabulary.job_of(patient, 320, TOKENS, 1)
    model = plain_step.changed(job, job.build_model(), [variant])
    assert (type(model.head), model.head.out_features) == (torch.nn.Linear, 320)
    assert model.head.weight is model.embedding.weight
    assert sum(isinstance(each, Float8Linear) for each in model.modules()) == fp8
    assert sum(each._compiled_call_impl is not None for each in model.modules()) == compiled
    assert job.example_batch() is TOKENS
    assert patient.VOCABULARY == 50257


@pytest.mark.slow
def test_a_tiny_run_keeps_and_prints_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert padded_vocabulary.main([str(out), "--tiny"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text("utf-8"))
    assert printed.startswith(f"{result['machine']}\n\n| step ")
    assert f"torch {result['versions']['torch']} · torchao {result['versions']['torchao']}" in printed
    assert result["vocabularies"] == [257, 320]
    assert [(each["variant"], each["vocabulary"]) for each in result["steps"]] == [
        (variant, width) for variant in padded_vocabulary.VARIANTS for width in (257, 320)
    ]
    assert [(each["role"], each["vocabulary"]) for each in result["head_gemms"]] == [
        (role, width) for role in ("output", "input_gradient", "weight_gradient") for width in (257, 320)
    ]
    assert all(
        each["ms"] > 0 and (each["tokens"], each["width"]) == (32, 1024) for each in result["head_gemms"]
    )


def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert padded_vocabulary.main([str(tmp_path / "out.json")]) == 1
    assert not any(tmp_path.iterdir())


def test_what_is_modelled_is_the_finding_of_the_recorded_patient_on_this_gpu() -> None:
    (finding,) = load_report(padded_vocabulary.RECORDED, assume_gpu="H100", select=("SHP008",)).findings
    assert finding.saving_ms is not None
    found = padded_vocabulary.modelled("NVIDIA H100 80GB HBM3")
    assert found == {
        "gpu": "H100",
        "saved_ms": [finding.saving_ms.low, finding.saving_ms.high],
        **{key: finding.evidence[key] for key in ("now_ms", "padded_ms", "step_ms")},
    }
    slower = padded_vocabulary.modelled("NVIDIA H100 PCIe")
    assert slower is not None
    assert slower["step_ms"] > found["step_ms"]
    assert padded_vocabulary.modelled("Tesla T4") is None


def made(modelled: dict[str, Any] | None, steps_ms: tuple[float, float]) -> dict[str, Any]:
    widths = (50257, 50304)
    return {
        "machine": "a machine",
        "vocabularies": list(widths),
        "steps": [
            {"variant": variant, "vocabulary": width, "step_ms": ms, "peak_gib": 20.0}
            for variant in padded_vocabulary.VARIANTS
            for width, ms in zip(widths, steps_ms, strict=True)
        ],
        "head_gemms": [
            {"role": role, "vocabulary": width, "ms": ms}
            for role in padded_vocabulary.ROLES
            for width, ms in zip(widths, (8.0, 2.0), strict=True)
        ],
        "modelled": modelled,
    }


def cells(table: str, first: str) -> list[str]:
    """The other cells of a row that begins so."""
    row = next(line for line in table.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_table_tells_how_much_of_the_saving_the_gemms_are() -> None:
    told = {"gpu": "H100", "saved_ms": [15.0, 25.0], "now_ms": 25.0, "padded_ms": 5.0, "step_ms": 99.0}
    table = padded_vocabulary.table(made(told, (100.0, 80.0)))
    for variant in padded_vocabulary.VARIANTS:
        assert cells(table, variant) == ["100.0", "20.0", "80.0", "20.0", "20.0", "20 %", "90 %"]
    assert cells(table, "all three") == ["24.00", "6.00", "18.00"]
    assert cells(table, "GEMMs of the head, ms") == ["25.0", "24.0"]
    assert cells(table, "saved of it by padding, ms") == ["15.0 to 25.0", "20.0"]


@pytest.mark.parametrize("steps_ms", [(80.0, 80.0), (80.0, 81.0)])
def test_of_a_step_that_padding_does_not_shorten_no_share_is_told(steps_ms: tuple[float, float]) -> None:
    table = padded_vocabulary.table(made(None, steps_ms))
    assert cells(table, "FP8 tensorwise, eager")[-1] == "–"
    assert "SHP008 models nothing on this GPU." in table
