"""Every time and every speedup on a check's page is held by a recording that the page names, or is
somebody else's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.facts import recorded
from fp8doctor.registry import discover
from tests.recordings import files, name_of, text_of

TESTS = Path(__file__).parent
FOLDERS = (TESTS / room / "recorded" for room in ("running", "patients", "benchmarks"))
RECORDINGS = {name_of(path): path for folder in FOLDERS for path in files(folder)}

NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(?: (ms)\b|(x)\b)")
RECORDING = re.compile(r"[`/](h[12]00\w*-\w+)(?:`|\.json)")
MEASURED = re.compile(r"tests/benchmarks/(measured/\w+\.json\.gz)")

NOT_MEASURED_HERE = {
    "MOD004": {"1.3x": "Amdahl's law"},
}
"""Code -> number -> whose it is. What was measured here belongs into a recording."""


def stated(page: str) -> list[str]:
    """Numbers of the prose; lines of code are an example."""
    prose = " ".join(re.sub(r"^    .*", "", page, flags=re.M).split())
    return [f"{value}{' ms' if ms else 'x'}" for value, ms, _ in NUMBER.findall(prose)]


@cache
def of_recording(name: str) -> frozenset[str]:
    """The times of the steps and their kernels, what each is of the best BF16, and what the report says."""
    document = replay(RECORDINGS[name])
    arms = [arm for arm in document.facts.arms() if arm.tried and recorded(arm, "step_ms") and arm.step_ms]
    bf16 = [arm.step_ms or 0.0 for arm in arms if arm.name.startswith("bf16")]
    times = [arm.step_ms or 0.0 for arm in arms]
    if watched := document.facts.get("observed.steps_ms"):
        times.append(median(watched))
    for arm in arms:
        if recorded(arm, "breakdown") and arm.breakdown:
            times += arm.breakdown.families_ms.values()
    times += map(abs, document.answer.compared.parts_ms.values())
    said = " ".join((document.verdict.summary, *(each.title for each in document.findings)))
    return frozenset(
        [f"{each:,.1f} ms" for each in times]
        + [f"{base / each.step_ms:.2f}x" for base in bf16 for each in arms if each.step_ms]
        + [f"{value}{' ms' if ms else 'x'}" for value, ms, _ in NUMBER.findall(said)]
    )


@cache
def of_measurement(name: str) -> frozenset[str]:
    return frozenset(map("{:,.1f} ms".format, floats(json.loads(text_of(TESTS / "benchmarks" / name)))))


def floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from floats(each)


def without_source(code: str, page: str) -> list[str]:
    """Numbers that no recording of the page holds."""
    known = {*NOT_MEASURED_HERE.get(code, {})}
    known.update(*map(of_recording, RECORDING.findall(page)), *map(of_measurement, MEASURED.findall(page)))
    return [number for number in stated(page) if number not in known]


@pytest.mark.slow
def test_a_page_states_what_a_recording_holds() -> None:
    unknown = {check.code: without_source(check.code, check.page) for check in discover()}
    assert {code: numbers for code, numbers in unknown.items() if numbers} == {}


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        ("On one H200 it took 27.3 ms.", ["27.3 ms"]),
        ("`h200-decoder_468m` takes 371.8 ms, 0.26x of BF16.", []),
        (
            "It takes 371.8 ms and 371.9\nms (tests/patients/recorded/h200-decoder_468m.json.gz).",
            ["371.9 ms"],
        ),
        ("Pad it.\n\n    pad()   # 3x", []),
        ("128x128 blocks, capability 12.x.", []),
    ],
)
def test_what_has_no_source(page: str, numbers: list[str]) -> None:
    assert without_source("ANY", page) == numbers


def test_no_source_is_left_over() -> None:
    pages = {check.code: check.page for check in discover()}
    for code, numbers in NOT_MEASURED_HERE.items():
        assert set(numbers) <= set(stated(pages[code]))
