"""What a recorded screen calls unknown has a number nowhere else on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
