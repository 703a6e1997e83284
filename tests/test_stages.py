"""How far an examination is: stages that never go back, and a time that is of the budget or not told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fp8doctor import stages
from fp8doctor.stages import BEFORE_TRIAL, OF_TRIAL, Course, Doing, Stage, Teller


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_a_trial_is_told_with_what_is_left_of_its_budget(clock: Clock) -> None:
    told: list[tuple[Doing, str | None]] = []
    teller = Teller(lambda doing, arm: told.append((doing, arm)), clock.now + 60, before=BEFORE_TRIAL)
    for stage in OF_TRIAL:
        teller.begin(stage)
        clock.now += 10
    teller.say("profiling a variant", "breakdown")
    numbers = [doing.stage for doing, _ in told]
    assert numbers == [3, 4, 5, 6, 6]
    assert {doing.stages for doing, _ in told} == {len(Stage)}
    assert [doing.left_s for doing, _ in told] == [60, 50, 40, 30, 20]
    assert told[-1] == (Doing("profiling a variant", 6, 6, 20), "breakdown")


def test_the_time_of_all_is_what_loading_took_and_the_budget(clock: Clock) -> None:
    course = Course()
    course.take(Doing("loading m.py", 1, 7))
    clock.now += 12
    assert (course.words(), course.clock()) == ("1/7 loading m.py", "12 s")
    course.take(Doing("timing its matmuls alone", 3, 7, left_s=60))
    clock.now += 6
    assert course.clock() == "18 s of about 72 s"
    course.take(Doing("building BF16", 4, 7, left_s=54))
    assert course.clock() == "18 s of about 72 s"
    clock.now += 58
    assert course.clock() == "76 s of about 72 s"
    clock.now += 10
    assert course.clock() == "86 s of about 72 s"


def test_the_stage_never_goes_back(clock: Clock) -> None:
    course = Course()
    assert course.take(Doing("building BF16", 4, 7, left_s=30))
    assert not course.take(Doing("building FP8", 4, 7, left_s=20))
    assert course.take(Doing("bf16: it died; starting again without it"))
    assert course.line() == "bf16: it died; starting again without it"
    assert not course.take(Doing("loading m.py", 1, 7))
    assert course.line() == "4/7 loading m.py"
    assert course.take(Doing("timing the variants in turn", 5, 7, left_s=30))
    assert course.line() == "5/7 timing the variants in turn (0 s of about 30 s)"


@pytest.mark.parametrize("columns", [12, 30, 60, 200])
def test_a_line_fits_into_the_terminal(clock: Clock, columns: int) -> None:
    course = Course()
    course.take(Doing(f"looking at {'x' * 100}.py", 2, 2))
    line = course.fitted(columns, "-")
    assert len(line) <= columns
    assert line.endswith(" - 0 s")
    assert line.startswith("2/2" if columns > 12 else "2/")
