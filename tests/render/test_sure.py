"""The title, its mark and the row Sure of every recorded screen agree with what was timed or estimated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.analysis.arms import ratio_on_screen, uses_fp8
from fp8doctor.analysis.noise import is_noise
from fp8doctor.analysis.plan_end import is_in_fp8
from fp8doctor.analysis.significance import EVEN, is_even
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.render.causes import state_now
from fp8doctor.render.headline import TOO_LARGE
from tests.diagnosis.test_plan_agrees import ALL, replayed
from tests.recordings import name_of
from tests.render.test_next_commands import SHARDED

PATHS = [*ALL, *SHARDED]
EVERY = pytest.mark.parametrize("path", PATHS, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in PATHS])
SIZE = r"([\d.]+)x"


def within(size: str, low: str, high: str) -> bool:
    return float(low) <= float(size) <= float(high)


@EVERY
def test_the_size_of_the_title_lies_in_the_interval_of_sure(path: Path) -> None:
    _, screen, _ = replayed(path)
    said = screen.answer
    title = re.match(rf"FP8 (?:compute )?(?:is|would be) {SIZE} (?:faster|slower)", said.what)
    interval = re.search(rf"{SIZE} to {SIZE}(?: (?:faster|slower))? in \d+ rounds", said.sure)
    if title and interval and "speed of" not in said.sure.split(" in ")[0]:
        assert within(title[1], *interval.groups()), said


@EVERY
def test_faster_for_sure_is_not_even(path: Path) -> None:
    """An interval that reaches into what counts as even says so."""
    _, screen, _ = replayed(path)
    sizes = re.search(rf"Yes: {SIZE} to {SIZE} (faster|slower) in \d+ rounds", screen.answer.sure)
    if sizes:
        assert float(sizes[1]) >= 1 + EVEN - 0.005, screen.answer.sure


@EVERY
def test_a_fault_is_graded_before_the_speed(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.status in GRAVE or state_now(report):
        assert screen.answer.sure.startswith("The fault: yes"), screen.answer.sure


@EVERY
def test_sure_grades_fp8_as_it_is_and_no_other_variant_that_the_plan_leaves(path: Path) -> None:
    report, screen, view = replayed(path)
    if view.gives_up_fp8 and view.as_is and report.verdict.status in GRAVE:
        assert not re.search(r"FP8[^.]*(runs at|is slower|is faster)", screen.answer.sure), screen.answer.sure


@EVERY
def test_a_promise_that_was_timed_has_an_interval(path: Path) -> None:
    """Unless it is the best BF16: the interval of the title is that of both."""
    report, screen, view = replayed(path)
    end = view.end
    if not screen.fixes or end is None or end.is_as_is or report.verdict.status in GRAVE:
        return
    of_the_title = end.arm is view.bf16 or view.as_is is view.bf16
    if not of_the_title and "faster than now" in screen.answer.then.sentence:
        assert re.search(rf": {SIZE} to {SIZE} faster than now", screen.answer.sure), screen.answer


@EVERY
def test_an_interval_names_every_fix_that_its_step_has(path: Path) -> None:
    """A step in BF16 has the fix that leaves FP8 off too."""
    report, screen, view = replayed(path)
    named = re.search(
        r"With (all|this|fix[^:]*)[^:]*: [\d.x]+ to [\d.x]+ faster than now", screen.answer.sure
    )
    if not named or not view.end:
        return
    of_it = [
        number
        for number, step in enumerate(report.prescription, 1)
        if step.treatment.name in view.end.changes
        or (view.end.in_bf16 and step.treatment.name == STAY_IN_BF16)
    ]
    numbers = [int(each) for each in re.findall(r"\d+", named[1])]
    assert of_it == (numbers or [*range(1, len(report.prescription) + 1)]), screen.answer


@EVERY
def test_an_fp8_variant_that_is_even_is_not_told_as_slower(path: Path) -> None:
    """One rule decides for the verdict and for the fix."""
    report, screen, view = replayed(path)
    if not view.gives_up_fp8 or view.end is None or not screen.answer.fix:
        return
    timed = [each for each in report.facts.trial.arms if each.tried and each.step_ms and is_in_fp8(each)]
    best = min(timed, key=lambda each: each.step_ms or 0.0)
    noisy = is_noise(view.end.arm, best, report.facts.trial)
    told = re.search(r"the fastest FP8 that was timed takes ([\d,.]+) ms", screen.answer.fix[0])
    if told and float(told[1].replace(",", "")) == round(best.step_ms or 0.0, 1):
        even = noisy or is_even(ratio_on_screen(view.end.arm, best))
        assert not even, screen.answer.fix[0]


@EVERY
def test_fp8_that_its_bound_rules_out_needs_no_more_time(path: Path) -> None:
    _, screen, _ = replayed(path)
    said = screen.answer
    bound = re.search(rf"Upper bound: {SIZE} BF16", said.limit)
    if bound and float(bound[1]) < 1.095:
        assert "FP8 is undecided" not in said.then.sentence, said


@EVERY
def test_an_answer_has_one_bound(path: Path) -> None:
    _, screen, _ = replayed(path)
    limit = screen.answer.limit
    assert not ("The whole step" in limit and "Upper bound" in limit and "not profiled" not in limit), limit
    assert "0.00x" not in screen.answer.sure


@EVERY
def test_a_time_at_full_depth_that_was_not_run_is_called_extrapolated(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.facts.get("trial.blocks"):
        assert "measured" not in screen.answer.numbers
        assert not [each for each in screen.fixes if each.aside.endswith(", measured")]


@EVERY
def test_the_mark_follows_the_harm(path: Path) -> None:
    """Estimates count too; the exit code of those is 0."""
    report, screen, _ = replayed(path)
    said = screen.answer
    if re.match(r"FP8 is about [\d.]+x slower", said.what) or "Slower as it is: likely" in said.sure:
        assert said.tone == "bad"
    if said.tone == "good":
        assert re.search(r"^FP8[^;]* faster", said.what)
    if report.worst() == "error":
        assert said.tone == "bad"


@EVERY
def test_sure_answers_no_question_with_no_estimate(path: Path) -> None:
    _, screen, _ = replayed(path)
    assert not re.search(r"No: (no estimate|the estimate|with|as it is|FP8 was)", screen.answer.sure)


@EVERY
def test_no_interval_reaches_above_the_bound_that_its_screen_names(path: Path) -> None:
    _, screen, _ = replayed(path)
    bound = re.search(rf"Upper bound: {SIZE} BF16", screen.answer.limit)
    spans = re.findall(
        rf"{SIZE} to {SIZE}(?: faster|(?: faster)? in \d+ rounds| the speed of BF16)", screen.answer.sure
    )
    if bound and not re.search("above the bound|(?i:slower)|than now", screen.answer.sure):
        assert all(float(high) <= float(bound[1]) + 0.005 for _, high in spans), screen.answer


@EVERY
def test_a_job_that_does_not_fit_has_no_now(path: Path) -> None:
    _, screen, _ = replayed(path)
    if screen.answer.what == TOO_LARGE:
        assert "than now" not in screen.answer.then.sentence


@EVERY
def test_a_job_that_stops_has_no_now(path: Path) -> None:
    """Nothing is faster than a step that does not end, and no fix saves time of it."""
    report, screen, _ = replayed(path)
    told = " ".join(each.explanation for each in report.findings if each.severity == "error")
    stops = re.search(r"and stops with|Accelerator\(\) raises|importing it raises", told)
    if report.verdict.status == "step_raises" or (stops and not uses_fp8(report.facts)):
        assert "than now" not in screen.answer.then.sentence
        assert not [each for each in screen.fixes if "saves" in each.aside]


@EVERY
def test_fp8_that_is_estimated_to_be_slower_has_its_parts(path: Path) -> None:
    """Advice that rests on an estimate shows the estimate."""
    report, screen, _ = replayed(path)
    slower = any("FP8 would be slower here (estimated)" in each for each in screen.answer.fix)
    if slower and report.verdict.status == "fp8_not_engaged":
        assert any("(estimated): " in each for each in screen.answer.why), screen.answer


@EVERY
def test_no_fix_is_graded_where_none_is_shown(path: Path) -> None:
    report, screen, _ = replayed(path)
    if not report.prescription:
        assert not re.search("with (the|all) fix", screen.answer.sure), screen.answer.sure


@EVERY
def test_a_variant_needs_no_step_that_was_timed(path: Path) -> None:
    _, screen, view = replayed(path)
    if view.as_is and view.as_is.step_ms:
        assert "needs the step as you run it" not in screen.untimed


@EVERY
def test_copies_were_timed_only_if_one_was(path: Path) -> None:
    report, screen, _ = replayed(path)
    if screen.ranks and not any(each.tried for each in report.facts.arms()):
        assert "then rank 0 timed copies" not in screen.ranks.job
    if report.facts.get("observed.steps_ms"):
        assert not any("The step could not be timed" in each for each in screen.answer.why)
        assert not screen.answer.what.startswith("Not timed")
