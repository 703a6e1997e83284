"""What could change an answer is open, and one command on the screen answers the gravest of it."""

import pytest
from msgspec.structs import replace

from fp8doctor.answer.open_questions import more_time_s
from fp8doctor.answer.sentences import box
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED, Facts
from fp8doctor.facts.arm_names import Reason
from fp8doctor.recipes import FASTEST
from tests import replays
from tests.analysis.test_whole_step import recorded_job, with_trial
from tests.checks.arms import ran, timed, too_late
from tests.diagnosis.trials import SLOW, Of, around

FP8 = {"as_is": around(90.0), "bf16": around(103.6)}


def estimated() -> Facts:
    """A compiled decoder whose estimate holds 1."""
    return replace(replays.of("patients", "h200-decoder_468m_compiled").report.facts, trial=NOT_RECORDED)


QUESTIONS = {
    "compiled BF16 was left out": lambda: Of({**FP8, "bf16_compiled": Reason.NO_TIME_LEFT}).facts(),
    "compiled FP8 was left out": lambda: Of({**SLOW, "prescribed": Reason.NO_TIME_LEFT}, bases={}).facts(),
    "the fastest recipe was left out": lambda: Of({**FP8, FASTEST[0]: Reason.NO_TIME_LEFT}).facts(),
    "noise": lambda: Of({**FP8, "as_is": around(90.0, spread=20.0)}).facts(),
    "the whole step": lambda: with_trial(recorded_job(), 37.1, 46.4),
    "an estimate that holds 1": estimated,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_one_command(name: str) -> None:
    said = diagnose(QUESTIONS[name]()).answer
    lines = [each.template for each in box(said).lines]
    assert said.open
    assert said.command
    assert lines.count("open.question") == 1


@pytest.mark.parametrize(("tensorwise_ms", "is_open"), [(80.0, False), (100.5, True), (150.0, False)])
def test_a_recipe_without_a_time_is_open_where_it_may_win(tensorwise_ms: float, is_open: bool) -> None:
    facts = replays.of("benchmarks", "h200-llama_3b_bf16").report.facts
    arms = (ran("as_is", 120.0), ran("bf16_compiled", 100.0), ran("float8_tensorwise", tensorwise_ms))
    said = diagnose(timed(facts, *arms, too_late("float8_rowwise_with_gw_hp"))).answer
    assert bool(said.open) is is_open
    assert said.compared.timed


def test_a_plan_without_a_time_is_closed_by_its_fastest_recipe() -> None:
    facts = replays.of("patients", "h200-rowwise_narrow").report.facts
    arms = (ran("as_is", 120.0), ran("bf16", 150.0), too_late("prescribed", "compile-blocks"))
    fastest = ran(FASTEST[0], 90.0, base="prescribed", treatments=(FASTEST[0],))
    assert diagnose(timed(facts, *arms)).answer.open
    assert not diagnose(timed(facts, *arms, fastest)).answer.open


def test_a_decided_answer_has_none() -> None:
    said = diagnose(Of(SLOW, bases={}).facts()).answer
    assert said.open == ()
    assert said.command == ""


@pytest.mark.parametrize(
    ("budget_s", "elapsed_s", "advised"), [(0.5, 3.0, 30), (10.0, 13.0, 30), (60.0, 90.0, 180)]
)
def test_the_budget_that_is_advised_is_more_than_the_trial_took(
    budget_s: float, elapsed_s: float, advised: int
) -> None:
    facts = Of({**FP8, "bf16_compiled": Reason.NO_TIME_LEFT}).facts()
    trial = replace(facts.trial, budget_s=budget_s, elapsed_s=elapsed_s, enough_s=None)
    assert more_time_s(trial) == advised
    nothing = replace(trial, arms=(), why=Reason.NO_TIME_LEFT, reason="")
    assert more_time_s(nothing) == advised
    assert more_time_s(replace(nothing, why=Reason.STEP_RAISES)) is None


def test_a_variant_without_a_name_that_does_not_fit_leaves_the_answer() -> None:
    facts = Of({**FP8, "as_is": Reason.DOES_NOT_FIT}).facts()
    arms = [replace(each, name=NOT_RECORDED) if each.name == "as_is" else each for each in facts.trial.arms]
    assert diagnose(replace(facts, trial=replace(facts.trial, arms=tuple(arms)))).answer.open
