"""Recordings of whole jobs, each with its report, its screen and its trial, made once for all tests."""

import functools
from pathlib import Path
from typing import NamedTuple

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.sentences import Box, box
from fp8doctor.answer.steps import Row
from fp8doctor.render.page import Bars, Page
from fp8doctor.render.report_page import page
from fp8doctor.report import Report, load_report
from tests.recordings import files, name_of

TESTS = Path(__file__).parent

ALL = [
    path
    for folder in ("patients", "benchmarks", "running", "sharded", "shared_gpu", "versions")
    for path in files(TESTS / folder / "recorded")
]

JOBS = [*{(path.parts[-3], name_of(path).partition("-")[2]): path for path in reversed(ALL)}.values()]
"""One recording of each job, for what does not depend on the GPU that timed it."""


class Replay(NamedTuple):
    """What this version says of one recording."""

    report: Report
    page: Page
    box: Box
    view: TrialView

    @property
    def rows(self) -> list[Row]:
        """The timed steps on the page."""
        return [row for part in self.page.parts if isinstance(part, Bars) for row in part.rows]


def case(path: Path) -> str:
    return f"{path.parts[-3]}-{name_of(path)}"


@functools.cache
def replayed(path: Path) -> Replay:
    report = load_report(path)
    return Replay(report, page(report), box(report.answer), TrialView(report.facts))


def of(folder: str, name: str) -> Replay:
    """Replay one recording: ``of("patients", "h200-moe")``."""
    return replayed(TESTS / folder / "recorded" / f"{name}.json.gz")
