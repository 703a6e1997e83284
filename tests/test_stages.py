"""How far an examination is: stages, each told once, and a time that is of the budget or not told."""

from types import SimpleNamespace

import pytest

from fp8doctor import stages
from fp8doctor.stages import Course, Doing, Stage, Teller


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
    teller = Teller(lambda doing, arm: told.append((doing, arm)), clock.now + 60)
    for stage in tuple(Stage)[2:]:
        teller.begin(stage)
        clock.now += 10
    teller.say("profiling a variant", "breakdown")
    assert [doing.stage for doing, _ in told] == [*tuple(Stage)[2:], Stage.PROFILING]
    assert [doing.left_s for doing, _ in told] == [60, 50, 40, 30, 20]
    assert told[-1] == (Doing("profiling a variant", Stage.PROFILING, 20), "breakdown")


def test_the_time_of_all_is_what_loading_took_and_the_budget(clock: Clock) -> None:
    course = Course()
    course.take(Doing("loading m.py", Stage.LOADING))
    clock.now += 12
    assert course.line() == "loading m.py"
    course.take(Doing("timing its matmuls alone", Stage.FORWARD, left_s=60))
    clock.now += 6
    assert course.clock() == "18 s of about 72 s"
    course.take(Doing("building BF16", Stage.BUILDING, left_s=54))
    assert course.clock() == "18 s of about 72 s"
    clock.now += 58
    assert course.clock() == "76 s of about 72 s"
    clock.now += 10
    assert course.clock() == "86 s of about 72 s"


def test_a_line_is_shown_for_each_stage_once(clock: Clock) -> None:
    course = Course()
    assert course.take(Doing("loading m.py", Stage.LOADING))
    assert course.take(Doing("building BF16", Stage.BUILDING, left_s=30))
    assert not course.take(Doing("building FP8", Stage.BUILDING, left_s=20))
    assert course.take(Doing("bf16: it died; starting again without it"))
    assert course.line() == "bf16: it died; starting again without it"
    assert not course.take(Doing("loading m.py", Stage.LOADING))
    assert course.line() == "loading m.py"
    assert course.take(Doing("timing the variants in turn", Stage.TIMING, left_s=30))
    assert course.line() == "timing the variants in turn (0 s of about 30 s)"


@pytest.mark.parametrize("columns", [12, 30, 60, 200])
def test_a_line_fits_into_the_terminal(clock: Clock, columns: int) -> None:
    course = Course()
    course.take(Doing(f"looking at {'x' * 100}.py", Stage.LOOKING))
    line = course.fitted(columns, "-")
    assert len(line) <= columns
    assert line.endswith(" - 0 s")
    assert line.startswith("looki" if columns > 12 else "loo")
