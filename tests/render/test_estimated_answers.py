"""An estimated screen says what the step is now, and promises no more than the plan's own gain."""

from __future__ import annotations

import re
from pathlib import Path

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16, MORE_TOKENS, STAY_IN_BF16, traits
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.diagnosis.expected_verdict import expected_speedup
from fp8doctor.diagnosis.giving_up import planned_speedup
from fp8doctor.facts import recorded
from fp8doctor.render.step_parts import estimate_told
from tests.diagnosis.test_plan_agrees import EVERY, replayed

CHANGES_THE_ESTIMATE = {KEEP_IN_BF16, MORE_TOKENS, STAY_IN_BF16}


@EVERY
def test_the_title_of_a_job_in_fp8_says_what_it_is(path: Path) -> None:
    report, screen, _ = replayed(path)
    if recorded(report.facts, "network") and uses_fp8(report.facts):
        assert "would be" not in screen.answer.what


@EVERY
def test_an_error_beside_an_estimate_is_the_title(path: Path) -> None:
    report, screen, _ = replayed(path)
    errors = [each.title for each in report.findings if each.severity == "error"]
    if errors and estimate_told(report):
        assert screen.answer.what in errors


@EVERY
def test_a_fix_that_the_estimate_does_not_know_gains_an_unknown_amount(path: Path) -> None:
    """The FP8 gain of the job as it is stands in the title, and is no gain of the plan."""
    report, screen, _ = replayed(path)
    now = expected_speedup(report.facts, report.findings) if estimate_told(report) else None
    steps = report.prescription
    if now is None or now.as_is is None or now.recipes or not steps or report.verdict.status in GRAVE:
        return
    planned = planned_speedup(report.facts, report.findings, steps)
    names = {step.treatment.name for step in steps}
    knows = now.gains_compiled and any(traits(name).compiles for name in names)
    then = screen.answer.then.sentence
    if planned and not (knows or names & CHANGES_THE_ESTIMATE):
        assert "the best BF16" not in then
        assert re.search(r"ms/step less than now|No estimate of the gain: ", then)
        assert "less than now" in then or "fp8doctor" in then, "the command that finds it"


@EVERY
def test_an_estimate_says_how_sure_it_is_of_its_title(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.basis == "modelled" and report.verdict.status not in GRAVE:
        states = " as it is| with the fix| with all fixes| in FP8 with every fix"
        speed = rf"(Faster|Slower)({states})?: (likely|not known)|Not faster: likely|As it is: not known"
        fault = r"(The fault: yes, [^.]*\. )?"
        assert re.match(rf"{fault}({speed}|Faster or slower: not known)\b", screen.answer.sure)
        assert "run on the GPU" not in screen.answer.sure


@EVERY
def test_what_the_job_shows_and_the_advice_are_two_sentences(path: Path) -> None:
    _, screen, _ = replayed(path)
    first, *others = screen.answer.sure.split(". ")
    assert others or not first.startswith("The fault")
    assert not any("The fault" in each or "read from the job" in each for each in others)


@EVERY
def test_an_estimate_that_the_advice_rests_on_has_a_range(path: Path) -> None:
    report, screen, _ = replayed(path)
    said = screen.answer
    rests_on_it = re.search(r"likely|the estimate allows both", said.sure)
    if rests_on_it and planned_speedup(report.facts, report.findings, report.prescription):
        assert re.search(r"\d\.\d\d to \d\.\d\dx", f"{said.numbers} {said.sure}")
