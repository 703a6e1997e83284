"""The page's tables are what this version says of the forty unseen threads; a change shows here."""

from __future__ import annotations

from typing import Any

import pytest

from research.complaints import (
    unseen_engines,
    unseen_last,
    unseen_late,
    unseen_mixed,
    unseen_more,
    unseen_next,
)
from research.complaints.unseen import MARK, OUTCOMES, PAGE, THREADS, answer, asked, misses, name_of, row
from tests.markdown import table

LATER = (unseen_engines, unseen_mixed, unseen_more, unseen_last, unseen_next, unseen_late)
BY_NAME = {name_of(each): each for each in THREADS}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_outcome_is_the_recorded_one(name: str) -> None:
    _, _, line = table(("",) * 5, [row(BY_NAME[name])]).splitlines()
    assert line in PAGE.read_text("utf-8").partition(MARK)[2].splitlines()


def test_no_cause_that_is_named_stands_behind_another() -> None:
    """Counted over all rebuilt jobs. SimpleFSDP's small rebuilt layers come first because of their size."""
    jobs = {name: each for name, each in BY_NAME.items() if "gpu" in each}
    outcomes = {name: answer(each)[2] for name, each in jobs.items()}
    behind = {name for name, each in outcomes.items() if each == "not first"}
    assert behind == {"torchtitan#3123"}
    assert sum(each == "right" for each in outcomes.values()) >= 18


def test_the_set_is_whole() -> None:
    """Forty threads, each with an outcome of the first run and, unless it was right, a reason."""
    assert len(BY_NAME) == 40
    assert {each["first"] for each in THREADS} <= set(OUTCOMES)
    assert all((each["first"] == "right") != ("why" in each) for each in THREADS)
    assert misses() in PAGE.read_text("utf-8")


def test_silence_is_told_from_an_answer() -> None:
    assert "that fp8doctor knows" in asked(
        "explain", "-", text="RuntimeError: nobody_knows this one in load_in_fp8"
    )


@pytest.mark.parametrize(
    ("of", "thread"),
    [pytest.param(of, each, id=name_of(each)) for of in LATER for each in of.THREADS],
)
def test_a_thread_of_the_later_sets_has_the_recorded_outcome(of: Any, thread: dict[str, Any]) -> None:
    _, _, line = table(("",) * 5, [of.row(thread)]).splitlines()
    assert line in of.PAGE.read_text("utf-8").partition(MARK)[2].splitlines()
    assert (thread["first"] == "right") != ("why" in thread)
