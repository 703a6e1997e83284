"""Staying in BF16 is not taken back on the same screen, and is for now only if FP8 may still win."""

from __future__ import annotations

import re
from pathlib import Path

from fp8doctor.analysis.plan_end import is_in_fp8
from fp8doctor.analysis.significance import LITTLE
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts.arm_names import LEFT_OUT_FOR_TIME, ArmName, is_in_bf16
from fp8doctor.facts.no_number import why_of
from fp8doctor.render.screen import Screen
from fp8doctor.report import Report
from tests.diagnosis.test_plan_agrees import EVERY, replayed


def staying(path: Path) -> tuple[Report, Screen, TrialView, str]:
    """The fix that stays in BF16 by times, empty without one."""
    report, screen, view = replayed(path)
    stays = view.gives_up_fp8 and any(s.treatment.name == STAY_IN_BF16 for s in report.prescription)
    told = next((each for each in screen.answer.fix if "tay in BF16" in each), "") if stays else ""
    return report, screen, view, told


@EVERY
def test_bf16_is_for_now_if_and_only_if_fp8_is_undecided(path: Path) -> None:
    _, screen, view, told = staying(path)
    then = screen.answer.then.sentence
    assert "Not every FP8 variant was timed" not in then
    if told:
        assert ("for now" in told) == ("FP8 is undecided" in then)
        as_is = view.as_is
        if "compiled FP8" in told and as_is:
            assert not as_is.get("graphs_run")
        assert not any("may gain" in each.text for each in screen.notices)


@EVERY
def test_fp8_that_has_little_to_gain_is_decided(path: Path) -> None:
    """No untimed variant can win if even free casts give less than what matters."""
    _, screen, view, told = staying(path)
    if told and view.most and view.most.speedup < LITTLE:
        assert "for now" not in told
        assert not any("to time more variants" in each for each in screen.next)


@EVERY
def test_fp8_of_which_only_the_users_own_step_was_timed_is_undecided(path: Path) -> None:
    _, _, view, told = staying(path)
    arms = [each for each in view.facts.arms() if not is_in_bf16(each.name)] if told else []
    timed = [each for each in arms if each.tried and is_in_fp8(each) and each.name != ArmName.AS_IS]
    late = [each for each in arms if why_of(each) in LEFT_OUT_FOR_TIME and each.get("treatments")]
    if late and not timed and not (view.bound and view.bound < LITTLE):
        assert "for now" in told


@EVERY
def test_fp8_as_fast_and_leaner_is_named_by_the_fix_that_leaves_it_off(path: Path) -> None:
    _, screen, _, told = staying(path)
    if told and "less if memory is short" in f"{screen.answer.then.sentence} {told}":
        assert re.search(r"only about as fast|noise hides", told)


@EVERY
def test_fp8_within_noise_of_the_bf16_of_the_plan_is_called_so(path: Path) -> None:
    _, screen, _, told = staying(path)
    if told and "the fastest FP8 that was timed" in told and "(noisy) for FP8" in screen.compared:
        assert "noise hides" in told
