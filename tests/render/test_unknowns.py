"""What a recorded screen calls unknown has a number nowhere else on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from tests.diagnosis.test_plan_agrees import EVERY, replayed

SAVES = re.compile(r"saves ([\d,.]+) to ([\d,.]+) ms/step, estimated")


@EVERY
def test_a_gain_that_is_unknown_is_no_saving_of_a_fix(path: Path) -> None:
    _, screen, _ = replayed(path)
    then = screen.answer.then.sentence
    if then.startswith("No estimate of the gain: "):
        assert not [each.aside for each in screen.fixes if "saves" in each.aside]


@EVERY
def test_a_speed_that_is_unknown_is_not_compared_with_now(path: Path) -> None:
    """What a fix saves of a step that is estimated with it gives the step as it is."""
    _, screen, _ = replayed(path)
    now, then = screen.answer.numbers, screen.answer.then.sentence
    if "no estimate as it is" in now:
        assert not re.search(r"(?<!at least )\b[\d,.]+ ms/step less than now", then)
    if found := re.search(r"about ([\d,.]+) to ([\d,.]+) ms/step as it is", now):
        saved = re.search(r"([\d,.]+) to ([\d,.]+) ms/step less than now", then)
        assert saved
        ends = [float(found[n].replace(",", "")) - float(saved[n].replace(",", "")) for n in (1, 2)]
        assert ends[0] == pytest.approx(ends[1], abs=1.01)


@EVERY
def test_what_a_fix_saves_is_in_the_answer_if_no_fix_was_timed(path: Path) -> None:
    _, screen, _ = replayed(path)
    then = screen.answer.then.sentence
    saved = [found for each in screen.fixes if (found := SAVES.search(each.aside))]
    if len(screen.fixes) == 1 and saved and "not timed" in then:
        assert f"{saved[0][1]} to {saved[0][2]} ms/step less" in then


@EVERY
def test_steps_that_were_timed_are_not_called_untimed(path: Path) -> None:
    _, screen, _ = replayed(path)
    said = screen.answer
    assert not ("steps were timed" in said.sure and "the step was not timed" in said.then.sentence)


@EVERY
def test_no_comparison_of_fp8_with_bf16_has_a_reason(path: Path) -> None:
    report, screen, _ = replayed(path)
    sure = screen.answer.sure
    if report.verdict.basis != "measured" and not report.facts.get("trial.arms", ()):
        assert not re.search(r"FP8 was not compared with BF16(;|\. )", sure), sure
        assert not re.search(r"no estimate(?! \()", sure), sure


@EVERY
def test_layers_that_do_not_learn_have_a_speed_now_or_a_reason_without_one(path: Path) -> None:
    report, screen, _ = replayed(path)
    if report.verdict.status == "layers_do_not_learn" and "with the fix: " in screen.answer.sure:
        told = " ".join((screen.answer.then.sentence, screen.answer.sure))
        assert re.search(r"[Aa]s it is|than now|steps were timed", told), told


@EVERY
def test_a_report_of_an_older_version_says_what_to_do(path: Path) -> None:
    _, screen, _ = replayed(path)
    told = " ".join(screen.answer.fix)
    assert "too old" not in told
    if "older version" in told:
        assert re.search(r"(make a new one|Time it [^:]+|Run it again): \w+", told)


@EVERY
def test_the_reason_of_an_unknown_gain_does_not_deny_an_estimate_of_the_screen(path: Path) -> None:
    report, screen, _ = replayed(path)
    said = screen.answer
    then = said.then.sentence
    estimated = re.search(r"^estimated|\d \(estimated\)", " ".join((said.numbers, *said.why)))
    assert not (estimated and "no cost model for thin LoRA matrices" in then), then
    one_process = report.facts.get("ranks.world_size", 1) == 1
    assert not (one_process and "no cost model for communication" in then), then
    assert "nothing compiles the FP8 layers" not in then
    if any(step.treatment.name == STAY_IN_BF16 for step in report.prescription):
        assert "No estimate: Unsloth" not in then
        assert "No estimate: a fix changes which layers run in FP8" not in then


@EVERY
def test_savings_that_are_called_estimates_are_shown(path: Path) -> None:
    _, screen, _ = replayed(path)
    if "The savings are estimates" in screen.answer.sure:
        asides = " ".join(each.aside for each in screen.fixes)
        assert re.search(r"saves|ms/step", f"{asides} {screen.answer.then.sentence}")


@EVERY
def test_a_budget_is_used_up_only_if_the_trial_took_it(path: Path) -> None:
    report, screen, _ = replayed(path)
    took, budget_s = report.facts.get("trial.elapsed_s"), report.facts.get("trial.budget_s")
    if took and budget_s and took < budget_s:
        assert not re.search("used up|ran out", screen.untimed)


@EVERY
def test_what_was_not_seen_compiled_is_not_counted(path: Path) -> None:
    _, screen, _ = replayed(path)
    if "did not see if it did" in " ".join(screen.answer.why):
        assert dict(screen.facts)["Compiled"] == "unknown"
