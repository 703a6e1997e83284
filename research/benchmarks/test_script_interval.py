"""Ninety per cent of the printed intervals hold the time of a plain script, on every page that has both."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from fp8doctor import load_report
from fp8doctor.analysis.noise import script_interval
from fp8doctor.analysis.significance import CONFIDENCE, Number
from fp8doctor.facts import Arm, Trial

RESULTS = Path(__file__).parent / "results"
TESTS = Path(__file__).parents[2] / "tests"
FOLDERS = (TESTS / "benchmarks" / "recorded", TESTS / "patients" / "recorded")
PAGES = {
    "trial_jobs_h100.md": "h100",
    "trial_jobs_h200.md": "h200",
    "trial_jobs_h200_older.md": "h200",
    "patients_h100.md": "h100",
    "printed_plans_h100.md": "h100",
}
"""Page -> GPU of its reports."""

VARIANT = re.compile(r"\| (\w+) cold \| ([\w-]+) \| ([\d.]+)(?: ± [\d.]+)? \| ([\d.]+) \|(?!.*another form)")
PLAN = re.compile(r"\| (\w+) \| [^|]*\((\w+)\) \| ([\d.]+) \| ([\d.]+) \|")


class Pair(Struct, frozen=True):
    """A step of a recorded trial and the time of its plain script."""

    gpu: str
    step: Arm
    trial: Trial
    plain_ms: float

    def held(self, by: Number | None) -> bool:
        return by is not None and by.low <= self.plain_ms <= by.high


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """Read the pages; a timing that two names tell counts once, one of a report that is gone does not."""
    found = {
        (gpu, job, told, plain): pair
        for page, gpu in PAGES.items()
        for job, name, told, plain in rows((RESULTS / page).read_text("utf-8"))
        for pair in pair_of(gpu, job, name, told, float(plain))
    }
    return tuple(found.values())


def rows(page: str) -> Iterator[tuple[str, str, str, str]]:
    yield from (*VARIANT.findall(page), *PLAN.findall(page))


def pair_of(gpu: str, job: str, name: str, told: str, plain_ms: float) -> Iterator[Pair]:
    paths = (folder / f"{gpu}-{job}.json.gz" for folder in FOLDERS)
    path = next((each for each in paths if each.exists()), None)
    trial = trial_of(path) if path else None
    for step in trial.arms if trial else ():
        if trial and step.name == name and step.tried and f"{step.step_ms:.1f}" == told and step.low_ms:
            yield Pair(gpu, step, trial, plain_ms)


@functools.cache
def trial_of(path: Path) -> Trial:
    return load_report(path).facts.trial


def share_held(of: list[Pair]) -> float:
    return sum(each.held(script_interval(each.step, each.trial)) for each in of) / len(of)


def of_its_rounds(step: Arm) -> Number:
    assert step.step_ms
    assert step.low_ms
    assert step.high_ms
    return Number(step.step_ms, step.low_ms, step.high_ms)


@pytest.mark.slow
def test_nine_of_ten_intervals_hold_the_time_of_a_plain_script() -> None:
    """On each GPU, and those of the rounds alone do not."""
    assert len(pairs()) >= 140
    for gpu in ("h100", "h200"):
        assert share_held([each for each in pairs() if each.gpu == gpu]) >= CONFIDENCE
    assert sum(each.held(of_its_rounds(each.step)) for each in pairs()) / len(pairs()) < 0.75
