"""ENV003 against the real Accelerator: what it calls sick raises there, what it calls healthy does not."""

from __future__ import annotations

import functools
import json

import msgspec
import pytest

from fp8doctor.checks.environment.fp8_backend_misspelled import BACKENDS, FIRES, SILENT
from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import NOT_RECORDED, Accelerate, Environment, Package, Target, Training
from tests.checks.environment.live import finding_of, launched, outcome_of, printed

WRITTEN = ("te", "ao", "torchao", "", " TE", "TE", "AO", "MSAMP", "NO", "transformer_engine")


@functools.cache
def verdicts_of_accelerate() -> dict[str, str]:
    """What `Accelerator()` does with each value: the text of the ValueError, or nothing."""
    program = """
import json, os, sys
from accelerate import Accelerator
from accelerate.state import AcceleratorState
said = {}
for written in json.loads(sys.argv[1]):
    os.environ["ACCELERATE_FP8_BACKEND"] = written
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        Accelerator(cpu=True)
        said[written] = ""
    except ValueError as error:
        said[written] = str(error)
print(json.dumps(said))
"""
    said: dict[str, str] = json.loads(printed(program, json.dumps(WRITTEN)).splitlines()[-1])
    return said


@pytest.mark.parametrize("written", WRITTEN)
def test_the_check_and_accelerate_agree(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", written)
    facts = examine_surroundings(Target(kind="environment", name="environment"))
    finding, said = finding_of("ENV003", facts), verdicts_of_accelerate()[written]
    assert bool(finding) == bool(said)
    if finding:
        assert said in finding.explanation
        assert finding.severity == "error"
        assert f"ACCELERATE_FP8_BACKEND={written}" in finding.title


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("te", "TE"),
        ("ao", "AO"),
        ("torchao", "AO"),
        ("transformer_engine", "TE"),
        (" TE ", "TE"),
        ("msamp", "MSAMP"),
        ("ms-amp", "MSAMP"),
        ("none", "NO"),
    ],
)
def test_the_treatment_names_what_was_meant(written: str, right: str) -> None:
    finding = finding_of(
        "ENV003",
        msgspec.structs.replace(
            FIRES, environment=Environment(variables={"ACCELERATE_FP8_BACKEND": written})
        ),
    )
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.code.startswith(f"export ACCELERATE_FP8_BACKEND={right} ")
    assert right in BACKENDS


def test_a_guess_is_not_sold_as_a_spelling() -> None:
    finding = finding_of(
        "ENV003",
        msgspec.structs.replace(
            FIRES, environment=Environment(variables={"ACCELERATE_FP8_BACKEND": "cutlass"})
        ),
    )
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.summary == "name one of TE, AO, MSAMP, NO"


@pytest.mark.parametrize("backend", ["te", "ao", "msamp"])
def test_the_launchers_own_flag_is_caught(backend: str) -> None:
    variables = launched("--mixed_precision", "fp8", "--fp8_backend", backend)
    finding = finding_of(
        "ENV003", msgspec.structs.replace(FIRES, environment=Environment(variables=variables))
    )
    assert finding is not None
    assert f"accelerate launch --fp8_backend {backend} sets this value" in finding.explanation


def test_not_set_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND", raising=False)
    assert (
        outcome_of("ENV003", examine_surroundings(Target(kind="environment", name="environment"))).outcome
        == "not_applicable"
    )


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        ("1.8.1", "not_applicable"),
        ("1.9.0", "sick"),
        ("1.15.0.dev0", "sick"),
        (None, "sick"),
        ("main", "sick"),
    ],
)
def test_only_an_accelerate_that_reads_the_variable_minds(version: str | None, outcome: str) -> None:
    facts = msgspec.structs.replace(
        FIRES,
        software=msgspec.structs.replace(
            FIRES.software, packages={"accelerate": Package(version=version, imported=True)}
        ),
    )
    assert outcome_of("ENV003", facts).outcome == outcome


def test_without_accelerate_nothing_reads_it() -> None:
    facts = msgspec.structs.replace(FIRES, software=msgspec.structs.replace(FIRES.software, packages={}))
    assert outcome_of("ENV003", facts).outcome == "not_applicable"


def test_a_prepared_model_proves_that_it_was_not_read() -> None:
    prepared = msgspec.structs.replace(
        FIRES, training=Training(accelerate=Accelerate(mixed_precision="fp8", prepared=True))
    )
    assert outcome_of("ENV003", prepared).outcome == "not_applicable"
    assert outcome_of("ENV003", msgspec.structs.replace(FIRES, training=NOT_RECORDED)).outcome == "sick"
    assert outcome_of("ENV003", SILENT).outcome == "healthy"
