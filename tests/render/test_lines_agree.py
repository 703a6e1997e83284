"""No two lines of a recorded screen contradict each other."""

from __future__ import annotations

import re
from pathlib import Path

from fp8doctor.analysis.arms import fair_bf16
from fp8doctor.analysis.significance import EVEN
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import in_ms
from tests.diagnosis.test_plan_agrees import EVERY, replayed


@EVERY
def test_a_plan_that_was_timed_says_what_it_gains(path: Path) -> None:
    _, screen, view = replayed(path)
    if screen.fixes and view.end and view.as_is and not view.end.is_as_is:
        assert re.search(r"\d(\.\d+)?x faster than now", screen.answer.then.sentence)


@EVERY
def test_a_speed_that_is_even_is_called_so_everywhere(path: Path) -> None:
    """The quotient of two times that the screen calls even is no gain."""
    report, screen, view = replayed(path)
    then = screen.answer.then.sentence
    if report.verdict.status == "fp8_even" and (view.end is None or view.end.is_as_is):
        assert not re.search(r"x (faster|slower) than the best BF16", then)
    for ratio in re.findall(r"([\d.]+)x faster than the best BF16", then):
        if report.verdict.basis == "measured":
            assert float(ratio) >= 1 + EVEN - 0.005, then


@EVERY
def test_the_best_bf16_of_a_promise_is_that_of_the_title(path: Path) -> None:
    """Another BF16 is called by its name."""
    report, screen, view = replayed(path)
    total = view.end.arm if view.end else view.as_is
    measure = fair_bf16(report.facts, total) if view.on_gpu and total and view.bf16 else None
    named = re.findall(r"the best BF16 \(([\d,.]+ ms)\)", screen.answer.then.sentence)
    if named and view.bf16 and measure and measure.name != ArmName.AS_IS:
        assert named == [in_ms(view.bf16.step_ms)]
