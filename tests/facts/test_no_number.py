"""Why there is no number is asked of its kind, not of a sentence; a trial that lost a part keeps the rest."""

import pytest

from fp8doctor.facts import NOT_RECORDED, Arm, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import BREAKDOWN, NoNumber, did_not_fit, sentence_of, why_of, without

TIMED = Arm(name="as_is", tried=True, step_ms=1.0)
SHORT = Arm(
    name="short",
    treatments=("x",),
    tried=False,
    why=Reason.OUT_OF_MEMORY,
    reason="the GPU's memory is too small for it",
)
DIED = NoNumber(Reason.TOOK_PROCESS_DOWN, "it died")


@pytest.mark.parametrize("gaps", [NOT_RECORDED, {"trial.rows": "no time"}], ids=["none yet", "another"])
def test_a_part_that_is_no_arm_is_a_gap(gaps: dict[str, str]) -> None:
    kept = without(Trial(arms=(TIMED,), gaps=gaps), BREAKDOWN, DIED)
    assert kept.arms == (TIMED,)
    assert kept.gaps == {**(gaps or {}), "trial.arms.breakdown": "it died"}


def test_an_arm_that_has_no_time_keeps_what_it_is() -> None:
    first, second = without(Trial(arms=(TIMED, SHORT)), "short", DIED).arms
    assert first == TIMED
    assert (second.treatments, second.tried) == (("x",), False)
    assert (second.why, second.reason) == (Reason.TOOK_PROCESS_DOWN, "it died")


@pytest.mark.parametrize("part", ["as_is", "unknown"])
def test_an_arm_that_has_a_time_keeps_it(part: str) -> None:
    assert without(Trial(arms=(TIMED,)), part, DIED).arms == (TIMED,)


def test_an_older_recording_says_in_its_sentence_that_time_was_short() -> None:
    short = Arm(name="x", tried=False, reason="the budget of 60 s was used up before it")
    assert why_of(short) is Reason.NO_TIME_LEFT
    assert sentence_of(short) == did_not_fit(60.0)
    assert why_of(Arm(name="x", tried=False, reason="torchao cannot be imported")) is None
