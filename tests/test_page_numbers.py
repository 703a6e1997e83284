"""Measured numbers on checks' pages and in docs/BELIEFS.md are those of recordings, or somebody else's."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fp8doctor.cost.matmuls import amdahl
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import recorded
from fp8doctor.registry import discover
from tests.markdown import ROOT, text
from tests.recordings import files, name_of, text_of

FOLDERS = (ROOT / "tests" / room / "recorded" for room in ("running", "patients", "benchmarks"))
RECORDINGS = {name_of(path): path for folder in FOLDERS for path in files(folder)}
NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(?: (ms)\b|(x)\b)")
RECORDING = re.compile(r"[`/](h[12]00\w*-\w+)(?:`|\.json)")
MEASURED = re.compile(r"(research/benchmarks/measured/\w+\.json\.gz)")
CODE = re.compile(r"\b[A-Z]{3,4}\d{3}\b")

NOT_MEASURED_HERE = {
    "MOD004": {"1.3x": "Amdahl's law"},
    "SHP005": {"1.52x": "pytorch/torchtitan#866"},
}
"""Code -> number -> whose it is. What was measured here belongs into a recording."""


def stated(page: str) -> list[str]:
    """Numbers of the prose; lines of code are an example."""
    prose = " ".join(re.sub(r"^    .*", "", page, flags=re.M).split())
    return [f"{value}{' ms' if ms else 'x'}" for value, ms, _ in NUMBER.findall(prose)]


@cache
def replayed(path: Path) -> Document:
    return replay(path)


@cache
def of_recording(name: str) -> frozenset[str]:
    """The times of the steps and their kernels, what each is of the best BF16, and what the report says."""
    document = replayed(RECORDINGS[name])
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
def of_measurement(path: str) -> frozenset[str]:
    return frozenset(map("{:,.1f} ms".format, floats(json.loads(text_of(ROOT / path)))))


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
    pages = {check.code: check.page for check in discover()}
    unknown = {code: without_source(code, page) for code, page in pages.items()}
    assert {code: numbers for code, numbers in unknown.items() if numbers} == {}
    for code, numbers in NOT_MEASURED_HERE.items():
        assert set(numbers) <= set(stated(pages[code]))
    planted = "It takes 371.8 ms and 371.9\nms (tests/patients/recorded/h200-decoder_468m.json.gz)."
    assert without_source("ANY", planted) == ["371.9 ms"]


BELIEFS = text("docs/BELIEFS.md")
SAID = re.compile(r"([\w-]+)(?: \([^)]*\))? ([\d.]+) (ms|GiB)")
UNITS = {"ms": "step_ms", "GiB": "peak_gib"}


@pytest.mark.slow
def test_a_belief_is_answered_by_what_its_recording_says() -> None:
    rows = [
        line.split(" | ") for line in BELIEFS.splitlines() if line.startswith("|") and "](../tests/" in line
    ]
    assert len(rows) > 20
    for belief, measured, cited in rows:
        path, *_ = re.findall(r"\(\.\./(tests/[^)]+)\)", cited)
        document, numbers, codes = replayed(ROOT / path), SAID.findall(measured), CODE.findall(measured)
        sizes = re.findall(r"counts (\d+)M\b", measured)
        assert numbers or codes or sizes, belief
        assert set(sizes) <= {f"{document.facts.network.parameters / 1e6:.0f}"}, belief
        assert len(numbers) == len(re.findall(r"\d (?:ms|GiB)", measured)), belief
        arms = {arm.name: arm for arm in document.facts.arms()} if numbers else {}
        assert [
            value for name, value, unit in numbers if f"{getattr(arms[name], UNITS[unit]):.1f}" != value
        ] == []
        assert set(codes) <= {finding.code for finding in document.findings}, belief
    assert {*CODE.findall(BELIEFS.partition("## Not measured")[2])} <= {check.code for check in discover()}
    assert all(f"{amdahl(share, 1.5):.2f}x" in BELIEFS for share in (0.6, 0.8))


def test_the_padded_vocabulary_took_what_is_said_of_it() -> None:
    said = re.findall(r"(\S+) (BF16|FP8)\s(?:took )?([\d.]+)(?: ms/step)? and then ([\d.]+)", BELIEFS)
    steps = json.loads(text_of(ROOT / "research/benchmarks/measured/h200_padded_vocabulary.json.gz"))["steps"]
    ran: dict[str, dict[int, float]] = {}
    for step in steps:
        how = "eager" if step["variant"].endswith("eager") else "compiled"
        ran.setdefault(f"{how} {step['variant'][:4].rstrip()}", {})[step["vocabulary"]] = step["step_ms"]
    assert {(f"{how} {what}", float(odd), float(padded)) for how, what, odd, padded in said} == {
        (name, *(round(times[width], 1) for width in (50257, 50304))) for name, times in ran.items()
    }
