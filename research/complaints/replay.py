"""Replay the complaints: ``python -m research.complaints.replay`` writes the table."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from accelerate.state import AcceleratorState, GradientState

from fp8doctor.registry import discover
from fp8doctor.render.text import render
from fp8doctor.report import Report
from tests.looked import looked
from tests.markdown import table
from tests.stand_ins import transformer_engine

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
MARK = "## The outcomes\n"
NOT_THREADS = ("__init__", "parts", "replay")
NAMES = tuple(
    path.stem
    for path in sorted(HERE.glob("*.py"))
    if path.stem not in NOT_THREADS and not path.stem.startswith(("test_", "unseen"))
)
COLUMNS = ("file", "stack", "GPU", "cause", "expected", "found, the first first", "outcome")
OUTCOMES = ("right", "wrong", "abstained", "ticked healthy")
GRADES = ("error", "warning", "info", None)

LEGEND = """
Right: a code that was expected comes first, where a reader begins: the first step of the prescription, else
the gravest finding. Wrong: another comes first. Abstained: nothing, or only an info, is said and the area of
the cause is not called healthy. Ticked healthy: it is. Nothing was timed, and no GPU was there. Each file
says what stands in for what. `python -m research.complaints.replay` writes this section.
"""


def complaint(name: str) -> ModuleType:
    return importlib.import_module(f"research.complaints.{name}")


def replayed(thread: ModuleType, patch: pytest.MonkeyPatch) -> Report:
    """The report on a rebuilt model; the stand-in for Transformer Engine is there where a file names it."""
    if "Transformer Engine's classes" in thread.STAND_IN:
        transformer_engine.install(patch)
    with mock.patch.dict(os.environ, getattr(thread, "ENVIRONMENT", {})):
        try:
            return looked(thread.build_model(), thread.example_batch(), assume_gpu=thread.GPU)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def codes_in_order(report: Report) -> tuple[str, ...]:
    """The codes as a reader meets them: by the prescription, then by gravity."""
    prescribed = [step.code for step in report.prescription]
    graver = sorted(report.findings, key=lambda finding: GRADES.index(finding.severity))
    return tuple(dict.fromkeys((*prescribed, *(finding.code for finding in graver))))


def outcome(thread: ModuleType, report: Report) -> str:
    found = codes_in_order(report)
    if found and found[0] in thread.EXPECTED:
        return "right"
    if report.prescription or report.worst() not in (None, "info"):
        return "wrong"
    areas = {each.area for each in discover() if each.code in thread.EXPECTED}
    ticked = set(re.findall(r"\[✓\] (\w+)", render(report)))
    return "ticked healthy" if areas <= ticked else "abstained"


def row(name: str) -> tuple[str, ...]:
    thread = complaint(name)
    with pytest.MonkeyPatch.context() as patch:
        report = replayed(thread, patch)
    return (
        f"[{name}]({thread.THREAD})",
        thread.STACK,
        thread.GPU,
        thread.CAUSE,
        " ".join(thread.EXPECTED),
        " ".join(codes_in_order(report)) or "-",
        outcome(thread, report),
    )


def section(rows: list[tuple[str, ...]]) -> str:
    """The outcomes by stack, and thread by thread."""
    counts = Counter((each[1], each[-1]) for each in rows)
    stacks = [*dict.fromkeys(each[1] for each in rows)]
    by_stack = [(stack, *(str(counts[stack, each]) for each in OUTCOMES)) for stack in stacks]
    total = ("all", *(str(sum(each[-1] == kind for each in rows)) for kind in OUTCOMES))
    return f"{MARK}{LEGEND}\n{table(('stack', *OUTCOMES), [*by_stack, total])}\n{table(COLUMNS, rows)}"


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(rule + section([row(name) for name in NAMES]), encoding="utf-8")
