"""What gained alone is put together, and timed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fp8doctor.facts import Trial
from fp8doctor.trial.measure import bench, profile_step, timer
from fp8doctor.trial.treatments.apply import NotTried
from fp8doctor.trial.variant import Variant, VariantPlan, as_it_is
from tests.trial.decoder import AS_IS, job, trial
from tests.trial.planted import (
    CLOCK,
    PLANTED,
    PROPOSED,
    TICKING_BF16,
    Ticking,
    explored,
    faster,
    ticking,
    worn,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]


def times(result: Trial) -> dict[str, tuple[float, str | None]]:
    """Step in tenths of a millisecond and base of every arm with a number."""
    return {arm.name: (round(10 * (arm.step_ms or 0)), arm.base) for arm in result.arms if arm.tried}


@pytest.mark.usefixtures("clock")
def test_without_a_winner_nothing_changes_and_nothing_is_done_twice() -> None:
    plans = (
        AS_IS,
        TICKING_BF16,
        PLANTED,
        explored("even", faster(1.0), PLANTED),
        explored("slower", faster(1.2), PLANTED),
    )
    result = trial(ticking(), *plans)
    assert times(result) == {
        "as_is": (100, None),
        "bf16": (50, None),
        "prescribed": (90, "as_is"),
        "even": (90, "prescribed"),
        "slower": (108, "prescribed"),
    }


@pytest.mark.usefixtures("clock")
def test_one_winner_is_the_prescription_and_is_not_timed_again() -> None:
    result = trial(
        ticking(),
        AS_IS,
        TICKING_BF16,
        PLANTED,
        explored("winner", faster(0.8), PLANTED),
        explored("slower", faster(1.2), PLANTED),
    )
    arms = {arm.name: arm for arm in result.arms}
    assert times(result) == {
        "prescribed": (72, "as_is"),
        "as_is": (100, None),
        "bf16": (50, None),
        "prescribed_first": (90, "as_is"),
        "winner": (72, "prescribed_first"),
        "slower": (108, "prescribed_first"),
    }
    assert arms["prescribed"].treatments == ("proposal", "winner")
    assert arms["prescribed"].rounds_ms == arms["winner"].rounds_ms


@pytest.mark.usefixtures("clock")
def test_several_winners_are_put_together_and_timed_beside_what_they_are_compared_with() -> None:
    plans = [
        explored("a", faster(0.8), PLANTED),
        explored("b", faster(0.7), PLANTED),
        explored("measurement", faster(0.1), PLANTED, ()),
    ]
    result = trial(ticking(), AS_IS, TICKING_BF16, PLANTED, *plans)
    arms = {arm.name: arm for arm in result.arms}
    assert times(result) == {
        "as_is": (100, None),
        "bf16": (50, None),
        "prescribed": (50, "as_is"),
        "as_is_first": (100, None),
        "bf16_first": (50, None),
        "prescribed_first": (90, "as_is_first"),
        "a": (72, "prescribed_first"),
        "b": (63, "prescribed_first"),
        "measurement": (9, "prescribed_first"),
    }
    assert arms["prescribed"].treatments == ("proposal", "a", "b")
    assert len({len(arms[name].rounds_ms) for name in ("as_is", "bf16", "prescribed")}) == 1
    assert arms["prescribed"].fp8_gemms == 2 * 3


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("base", [AS_IS, PLANTED], ids=["as_is", "prescribed"])
def test_a_combination_that_is_slower_than_the_best_alone_is_dropped(base: VariantPlan) -> None:
    plans = [explored("a", faster(0.8), base), explored("b", faster(0.7, only_alone=2.0), base)]
    result = trial(ticking(), AS_IS, TICKING_BF16, *([base] if base is PLANTED else []), *plans)
    start = PROPOSED if base is PLANTED else 1.0
    arms = {arm.name: arm for arm in result.arms}
    assert times(result)["prescribed"] == (round(100 * start * 0.7), "as_is")
    assert arms["prescribed"].treatments == (*base.treatments, "b")
    assert times(result)["combination"] == (round(100 * start * 0.8 * 0.7 * 2), "as_is")


@pytest.mark.usefixtures("clock")
def test_a_combination_that_fails_leaves_the_best_alone() -> None:
    def clashing(variant: Variant) -> Variant:
        if variant.model.share == 0.8:  # type: ignore[comparison-overlap]
            raise NotTried("they clash")
        return faster(0.7)(variant)

    result = trial(
        ticking(), AS_IS, TICKING_BF16, explored("a", faster(0.8), AS_IS), explored("b", clashing, AS_IS)
    )
    arms = {arm.name: arm for arm in result.arms}
    assert (arms["combination"].tried, arms["combination"].reason) == (False, "they clash")
    assert times(result) == {
        "prescribed": (70, "as_is"),
        "as_is": (100, None),
        "bf16": (50, None),
        "a": (80, "as_is"),
        "b": (70, "as_is"),
    }


@pytest.mark.usefixtures("clock")
def test_a_combination_that_fails_while_it_is_timed_leaves_the_best_alone_and_the_rest_of_the_trial() -> None:
    def wears_out(variant: Variant) -> Variant:
        alone = variant.model.share == 1.0  # type: ignore[comparison-overlap]
        return faster(0.7)(variant if alone else worn(4).make(variant))

    result = trial(
        ticking(), AS_IS, TICKING_BF16, explored("a", faster(0.8), AS_IS), explored("b", wears_out, AS_IS)
    )
    arms = {arm.name: arm for arm in result.arms}
    assert arms["combination"].reason == "it raises RuntimeError: worn out"
    assert times(result)["prescribed"] == (70, "as_is")
    assert "trial.numerics" in result.gaps, "which were asked for, and are told for what they lack"


@pytest.mark.usefixtures("clock")
def test_of_one_family_the_best_is_taken() -> None:
    recipes = [
        explored("recipe-rowwise", faster(0.8), AS_IS),
        explored("recipe-tensorwise", faster(0.7), AS_IS),
    ]
    result = trial(ticking(), AS_IS, TICKING_BF16, *recipes)
    assert next(arm.treatments for arm in result.arms if arm.name == "prescribed") == ("recipe-tensorwise",)


@pytest.mark.usefixtures("clock")
def test_a_proposal_that_is_faster_alone_than_all_together_is_the_prescription() -> None:
    alone = VariantPlan("good", faster(0.7), ("good",), True, "as_is", faster(0.7))
    both = VariantPlan("prescribed", faster(0.8), ("good", "bad"), True, "as_is", faster(0.8))
    result = trial(ticking(), AS_IS, TICKING_BF16, both, alone)
    assert times(result)["prescribed"] == (70, "as_is")
    assert next(arm.treatments for arm in result.arms if arm.name == "prescribed") == ("good",)


@pytest.mark.usefixtures("clock")
def test_a_model_without_fp8_gets_no_prescription_of_what_gained() -> None:
    plain = VariantPlan("as_is", as_it_is, fp8=False)
    winner = VariantPlan("winner", faster(0.5), ("winner",), False, "as_is", faster(0.5), explored=True)
    assert times(trial(job(model=Ticking(3).bfloat16()), plain, winner)) == {
        "as_is": (100, None),
        "winner": (50, "as_is"),
    }


def test_nothing_that_is_compared_is_profiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gained together is proven by the profile that explains it."""
    seen, proven = [], profile_step.Tracer.prove

    def noted(self: profile_step.Tracer, attempt: bench.Attempt, *, explain: bool = True) -> None:
        seen.append((attempt.plan.name, explain))
        proven(self, attempt, explain=explain)

    monkeypatch.setattr(profile_step.Tracer, "prove", noted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))
        trial(
            ticking(),
            AS_IS,
            TICKING_BF16,
            explored("a", faster(0.8), AS_IS),
            explored("b", faster(0.7), AS_IS),
        )
    assert seen == [("as_is", True), ("bf16", True), ("a", False), ("b", False), ("prescribed", True)]
