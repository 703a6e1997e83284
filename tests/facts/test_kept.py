"""A trial that lost one part keeps the rest, and says what is missing and why."""

from __future__ import annotations

import pytest

from fp8doctor.facts import Arm, Trial
from fp8doctor.facts.kept import PARTS, without
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial.layers.numerics import NUMERICS
from fp8doctor.trial.measure.profile_step import BREAKDOWN

TIMED = Arm(name="as_is", tried=True, step_ms=1.0)
SHORT = Arm(name="short", treatments=("x",), tried=False, reason="the GPU's memory is too small for it")


def test_the_parts_are_those_of_the_trial() -> None:
    assert set(PARTS) == {NUMERICS, BREAKDOWN}


@pytest.mark.parametrize("gaps", [NOT_RECORDED, {"trial.shapes": "no time"}], ids=["none yet", "another"])
@pytest.mark.parametrize(("part", "fact"), PARTS.items())
def test_a_part_that_is_no_arm_is_a_gap(part: str, fact: str, gaps: dict[str, str]) -> None:
    kept = without(Trial(arms=(TIMED,), gaps=gaps), part, "it died")
    assert kept.arms == (TIMED,)
    assert kept.gaps == {**(gaps or {}), fact: "it died"}


def test_an_arm_that_has_no_time_keeps_what_it_is() -> None:
    first, second = without(Trial(arms=(TIMED, SHORT)), "short", "it died").arms
    assert first == TIMED
    assert (second.treatments, second.tried, second.reason) == (("x",), False, "it died")


@pytest.mark.parametrize("part", ["as_is", "combination"])
def test_an_arm_of_a_second_window_leaves_the_first_as_it_is(part: str) -> None:
    first, second = without(Trial(arms=(TIMED,)), part, "it died").arms
    assert first == TIMED
    assert (second.name, second.tried, second.reason) == ("combination", False, "it died")
