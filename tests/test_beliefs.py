"""docs/BELIEFS.md: every number of its tables is the recording's, and every code is found when it replays."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from fp8doctor.cost import amdahl
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.registry import discover
from tests.recordings import text_of

PAGE = Path(__file__).parents[1] / "docs" / "BELIEFS.md"
TEXT = PAGE.read_text()
ROWS = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("|") and "](../tests/" in line]
PADDED = Path(__file__).parents[1] / "research" / "benchmarks" / "measured" / "h200_padded_vocabulary.json.gz"
UNITS = {"ms": "step_ms", "GiB": "peak_gib"}
NUMBER = re.compile(r"([\w-]+)(?: \([^)]*\))? ([\d.]+) (ms|GiB)")
CODE = re.compile(r"\b[A-Z]{3,4}\d{3}\b")


@cache
def replayed(link: str) -> Document:
    return replay(PAGE.parent / link)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_a_row_says_what_its_recording_says(row: list[str]) -> None:
    _, measured, cited = row
    documents = [replayed(link) for link in re.findall(r"\((\.\./tests/[^)]+)\)", cited)]
    numbers, codes = NUMBER.findall(measured), CODE.findall(measured)
    assert numbers or codes
    assert len(numbers) == len(re.findall(r"\d (?:ms|GiB)", measured))
    arms = {arm.name: arm for arm in documents[0].facts.arms()} if numbers else {}
    for name, value, unit in numbers:
        assert f"{getattr(arms[name], UNITS[unit]):.1f}" == value
    found = {finding.code for finding in documents[0].findings}
    assert set(codes) <= found


def test_the_padded_vocabulary_took_what_is_said_of_it() -> None:
    told = re.findall(r"(\S+) (BF16|FP8)\s(?:took )?([\d.]+)(?: ms/step)? and then ([\d.]+)", TEXT)
    assert {(f"{how} {what}", float(odd), float(padded)) for how, what, odd, padded in told} == {
        (name, *(round(times[width], 1) for width in (50257, 50304)))
        for name, times in step_ms_by_vocabulary().items()
    }


def step_ms_by_vocabulary() -> dict[str, dict[int, float]]:
    steps = json.loads(text_of(PADDED))["steps"]
    found: dict[str, dict[int, float]] = {}
    for step in steps:
        how = "eager" if step["variant"].endswith("eager") else "compiled"
        found.setdefault(f"{how} {step['variant'][:4].rstrip()}", {})[step["vocabulary"]] = step["step_ms"]
    return found


def test_what_has_no_measurement_names_checks_that_there_are() -> None:
    rows = TEXT.partition("## Not measured")[2]
    named = set(CODE.findall(rows))
    assert named
    assert named <= {check.code for check in discover()}


def test_a_trainer_that_honours_fp8_has_its_layers() -> None:
    facts = replayed("../tests/running/recorded/h200-trainer.json.gz").facts
    assert any(linear.use == "training" for linear in facts.network.linears)


def test_what_is_computed() -> None:
    assert f"{amdahl(0.6, 1.5):.2f}x, and\n80 % give" in TEXT or f"{amdahl(0.6, 1.5):.2f}x, and 80 %" in TEXT
    assert f"80 % give {amdahl(0.8, 1.5):.2f}x" in TEXT
