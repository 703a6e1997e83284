"""A screen never sends its reader to the command that was just run without a change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.facts import recorded
from fp8doctor.render.ended_ranks import ended_rank
from tests.diagnosis.test_plan_agrees import ALL, TESTS, replayed
from tests.recordings import files, name_of

SHARDED = files(TESTS / "sharded" / "recorded")
PATHS = [*ALL, *SHARDED]
EVERY = pytest.mark.parametrize("path", PATHS, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in PATHS])

CHANGED = re.compile(r"--budget|--trace|[Aa]pply|with it|again|in (BF16|FP8) too|on a GPU")
"""What makes the outcome another one: an option, a fix, a quiet machine, other precision or hardware."""


@EVERY
def test_a_trial_is_not_repeated_unchanged(path: Path) -> None:
    report, screen, _ = replayed(path)
    if not recorded(report.facts, "trial") or not report.facts.trial.get("arms"):
        return
    told = [each for _, sentences in screen.answer.rows for each in sentences]
    told += [report.next.command] if report.next else []
    for each in told:
        before, command, after = each.partition(
            "fp8doctor " if "fp8doctor run" not in each else "fp8doctor run"
        )
        if command and re.match(r" ?(--stop )?\S+\.py", after):
            assert CHANGED.search(f"{before[-60:]}{after}"), each


@EVERY
def test_a_rank_that_ended_has_its_reason_before_fixes_for_speed(path: Path) -> None:
    report, screen, _ = replayed(path)
    if not ended_rank(report.facts):
        return
    ends = [(each.get("end"), each.get("error")) for each in report.facts.ranks.processes]
    errors = [error for end, error in ends if end == "raised" and error]
    why, fix = " ".join(screen.answer.why), screen.answer.fix[0]
    assert all(each in why for each in errors)
    assert errors or "exit code" in fix
    for step in report.prescription:
        assert step.treatment.summary[1:] not in fix
