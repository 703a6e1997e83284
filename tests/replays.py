"""Recordings of whole jobs, each with its report, its screen and its trial, made once for all tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.report import Report, load_report
from tests.recordings import files, name_of

TESTS = Path(__file__).parent

ALL = [
    path
    for folder in ("patients", "benchmarks", "running", "sharded")
    for path in files(TESTS / folder / "recorded")
]


class Replay(NamedTuple):
    """What this version says of one recording."""

    report: Report
    screen: Screen
    view: TrialView


def case(path: Path) -> str:
    return f"{path.parts[-3]}-{name_of(path)}"


@functools.cache
def replayed(path: Path) -> Replay:
    report = load_report(path)
    return Replay(report, first_screen(report), TrialView(report.facts))


def of(folder: str, name: str) -> Replay:
    """Replay one recording: ``of("patients", "h200-moe")``."""
    return replayed(TESTS / folder / "recorded" / f"{name}.json.gz")
