"""Title, plan and promise of every recorded screen end in the same place, and name what they mean."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.facts import recorded
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.report import Report, load_report
from tests.recordings import files, name_of

TESTS = Path(__file__).parents[1]
ALL = [
    path for folder in ("patients", "benchmarks", "running") for path in files(TESTS / folder / "recorded")
]
EVERY = pytest.mark.parametrize("path", ALL, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in ALL])


@functools.cache
def replayed(path: Path) -> tuple[Report, Screen, TrialView]:
    report = load_report(path)
    return report, first_screen(report), trial_view(report.facts)


def patient(name: str) -> tuple[Report, Screen, TrialView]:
    return replayed(TESTS / "patients" / "recorded" / f"h200-{name}.json.gz")


def benchmark(name: str) -> tuple[Report, Screen, TrialView]:
    return replayed(TESTS / "benchmarks" / "recorded" / f"{name}.json.gz")


@EVERY
def test_plan_and_promise_end_in_the_same_precision(path: Path) -> None:
    report, screen, _ = replayed(path)
    stays = any(step.treatment.name == STAY_IN_BF16 for step in report.prescription)
    then, fixes = screen.answer.then.sentence, " ".join(screen.answer.fix)
    if stays:
        assert "With FP8" not in then
        assert "FP8 runs" not in then
    if "than FP8 would be" in then or ") in BF16" in then:
        in_fp8 = recorded(report.facts, "network") and uses_fp8(report.facts)
        assert stays or not (in_fp8 or report.verdict.status == "fp8_not_engaged")
    assert not re.search("Or (stay|leave)", fixes)


SAME_END = {
    "backend_missing": ["stay-in-bf16"],
    "env_overridden": ["stay-in-bf16"],
    "converted_by_hand": ["stay-in-bf16"],
    "gpt2_conv1d": ["stay-in-bf16"],
    "setting_without_effect": ["stay-in-bf16"],
    "accelerate_eager": ["stay-in-bf16"],
    "old_versions": ["stay-in-bf16", "upgrade-accelerate"],
    "backend_without_fp8": ["name-backend-and-precision"],
    "debug_switches": ["switches-off"],
}


@pytest.mark.parametrize("name", SAME_END)
def test_fp8_that_cannot_win_is_not_switched_on(name: str) -> None:
    report, screen, _ = patient(name)
    assert [step.treatment.name for step in report.prescription] == SAME_END[name]
    assert "FP8 runs" not in screen.answer.then.sentence
