"""What a recorded screen says of the trial's budget adds up, and a command that it offers can help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.diagnosis.next_step import more_time
from fp8doctor.render import text
from tests.diagnosis.test_plan_agrees import ALL, TESTS, replayed
from tests.recordings import files, name_of

RECORDED = [*ALL, *files(TESTS / "sharded" / "recorded")]
EVERY = pytest.mark.parametrize(
    "path", RECORDED, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in RECORDED]
)

OPTION = re.compile(r"--budget ([\d.]+)|budget_s=([\d.]+)")


@EVERY
def test_no_variant_lacks_seconds_that_were_left(path: Path) -> None:
    """What decides is kept for rounds and profiles too, so the seconds of one variant say nothing."""
    report, _, _ = replayed(path)
    took = report.facts.get("trial.elapsed_s")
    told = " ".join(text.render(report, verbose=True).split()) if took else ""
    for budget_s, needed in re.findall(r"budget of ([\d.]+) s [^.;)]*?\b(\d+) s\b", told):
        assert took + float(needed) >= float(budget_s)


@EVERY
def test_a_budget_that_is_named_is_the_time_spent_and_what_it_adds(path: Path) -> None:
    report, screen, _ = replayed(path)
    named = next((each for each in screen.next if "more variants" in each), "")
    if not named:
        return
    option, adds = OPTION.search(named), re.search(r"up to ([\d,]+) (s|min) more", named)
    assert option, named
    assert adds, named
    added_s = float(adds[1].replace(",", "")) * (60 if adds[2] == "min" else 1)
    spent_s = report.facts.get("trial.elapsed_s") or 0.0
    rounded_s = 1 if adds[2] == "s" else 30
    assert spent_s + added_s == pytest.approx(float(option[1] or option[2]), abs=rounded_s)
    assert f"{spent_s:.0f} s" in screen.method
    for other in OPTION.findall(" ".join(screen.answer.fix)):
        assert other == option.groups(default="")


@EVERY
def test_a_box_offers_what_removes_its_doubt(path: Path) -> None:
    """More time times more variants. Noise needs a quiet machine, a fix that no copy has needs its user."""
    report, screen, view = replayed(path)
    box = " ".join(sentence for _, row in screen.answer.rows for sentence in row)
    if re.search(r"\bfor now\b|advice may change|on an idle GPU|on a quiet machine", box):
        assert re.search(r"fp8doctor [\w-]+|--budget|inspect_model", box), box
    if "noise hides whether" in box:
        assert "--budget" not in box, box
        assert "on a quiet machine: fp8doctor" in box, box
    if "--budget" in box:
        assert more_time(report.facts), "no variant lacked time"
    if "was not timed" in box and "before it:" in box:
        assert re.search(r"\(not timed: |estimated\); before it:", box), box
        assert "Apply the fix, then time the step" in box, box
    if report.facts.get("gpus") and view.as_is is None:
        assert "no trial ran" not in box
