"""Losses of paired steps of a trial, and of two watched runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor.analysis.losses import COARSER, RunLosses, loss_gap, loss_in_words, non_finite_from, run_losses
from fp8doctor.diagnosis.comparison import compared
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, LossCurve, Observation, Trial
from fp8doctor.render.compare_page import page
from fp8doctor.render.table_page import as_text
from fp8doctor.render.text import render
from tests.diagnosis.trials import SLOW, Of
from tests.facts_of import DECODER_468M

Losses = tuple[float | None, ...]

LEARNED = (4.0, 3.0, 2.5, 2.3, 2.31)


def trial(fp8: Losses, *disturbed: Losses, bf16: Losses = LEARNED, **blocks: int) -> Trial:
    runs = [("as_is", fp8), ("bf16", bf16), *(("bf16_disturbed", each) for each in disturbed)]
    return Trial(
        losses=tuple(
            LossCurve(arm=arm, losses=losses, blocks=blocks, learning_rates=(1e-4,)) for arm, losses in runs
        )
    )


def shifted(by: float, losses: tuple[float, ...] = LEARNED) -> tuple[float, ...]:
    return tuple(each + by for each in losses)


def test_the_gap_is_told_in_multiples_of_what_a_last_bit_does() -> None:
    seen = trial(shifted(0.006), shifted(0.004), shifted(-0.006))
    assert loss_in_words(seen) == (
        "Loss after 5 steps on one batch, which they learn by heart: BF16 2.31, FP8 2.316, apart by 1.2 "
        "times what a last bit of BF16 weights does."
    )
    of_a_cut = trial(shifted(0.006), shifted(0.004), layers=4)
    assert "Loss after 5 steps of a cut of the model on one batch" in (loss_in_words(of_a_cut) or "")


@pytest.mark.parametrize(
    ("by", "far"), [(0.05, False), (0.3, True), (-0.3, True)], ids=["small", "lacks much", "lower too"]
)
def test_a_loss_is_far_off_beyond_its_rounding_and_by_a_good_part_of_what_was_learned(
    by: float, far: bool
) -> None:
    seen = trial(shifted(by), shifted(0.001))
    gap = loss_gap(seen)
    assert gap is not None
    assert gap.times is not None
    assert gap.times > COARSER
    assert gap.is_far is far
    assert ("compare longer runs" in (loss_in_words(seen) or "")) is far


def test_bits_that_change_nothing_give_no_multiple() -> None:
    gap = loss_gap(trial(shifted(0.5), LEARNED))
    assert gap is not None
    assert (gap.times, gap.is_far) == (None, False)


def test_a_loss_that_is_not_finite_is_told_from_its_step_on() -> None:
    seen = trial((4.0, 3.1, None, None, None), shifted(0.001))
    assert (loss_gap(seen), non_finite_from(seen)) == (None, 3)
    assert "FP8's loss is not finite from step 3 on" in (loss_in_words(seen) or "")
    both = trial((4.0, None), (4.0, None), bf16=(4.0, None))
    assert (loss_gap(both), non_finite_from(both), loss_in_words(both)) == (None, None, None)


@given(st.floats(-1, 1), st.floats(1e-6, 1), st.floats(0.1, 1000))
def test_the_multiple_does_not_depend_on_the_unit_of_the_loss(gap: float, noise: float, unit: float) -> None:
    first = loss_gap(trial(shifted(gap), shifted(noise)))
    scaled = tuple(each * unit for each in LEARNED)
    other = loss_gap(trial(shifted(gap * unit, scaled), shifted(noise * unit, scaled), bf16=scaled))
    assert first is not None
    assert other is not None
    assert first.times == pytest.approx(abs(gap) / noise, rel=1e-3, abs=1e-6)
    assert other.times == pytest.approx(first.times, rel=1e-3, abs=1e-6)


def with_losses(seen: Trial, **fields: object) -> Facts:
    from msgspec.structs import replace

    facts = Of(SLOW).facts()
    return replace(facts, trial=replace(facts.trial, losses=seen.losses, **fields))


def test_the_screen_tells_it_beside_the_times_and_the_verdict_where_it_is_far() -> None:
    near, far = trial(shifted(0.006), shifted(0.005)), trial(shifted(0.5), shifted(0.005))
    for seen, is_told in ((near, False), (far, True)):
        report = diagnose(with_losses(seen))
        assert "Loss after 5 steps on one batch" in " ".join(render(report).split())
        assert ("Loss after" in report.verdict.summary) is is_told


def test_why_it_was_not_followed_is_told() -> None:
    facts = with_losses(Trial(losses=()), gaps={"trial.losses": "the batch is synthetic"})
    assert "The loss was not followed: the batch is synthetic." in " ".join(
        render(diagnose(facts), verbose=True).split()
    )


def watched(*losses: float | None, warmup: int = 3) -> Facts:
    seen = Observation(
        steps_ms=tuple(100.0 for _ in losses), warmup=warmup, clock="cuda", losses=losses, compiled=0
    )
    return replace(DECODER_468M, observed=seen)


def told(first: Facts, second: Facts) -> str:
    documents = diagnose(first), diagnose(second)
    found = compared(*documents, ("bf16.json", "fp8.json"))
    return " ".join(as_text(page(found, documents), width=100).split())


def test_only_steps_of_the_same_number_are_compared() -> None:
    """A run that compiles warms up longer: its window begins later."""
    found = run_losses(watched(5.0, 4.0, 3.0, 2.0), watched(3.5, 2.5, 1.5, warmup=5))
    assert found == RunLosses(first_step=6, last_step=7, means=(2.5, 3.0), not_finite_from=(None, None))


@pytest.mark.slow
def test_the_table_holds_both_losses() -> None:
    said = told(watched(5.0, 4.0, 3.0), watched(5.5, 4.1, 3.0))
    assert "training loss 4.0000 4.2000 1.05x" in said
    assert "measured, the mean of 3 steps of either run, 4 to 6" in said
    assert "saw the same data is not known here" in said


@pytest.mark.slow
def test_a_loss_that_leaves_the_numbers_has_no_mean() -> None:
    said = told(watched(5.0, 4.0, 3.0), watched(5.5, None, None))
    assert "training loss 4.0000 -" in said
    assert "the loss of fp8.json is NaN or infinite at step 5" in said


@pytest.mark.slow
def test_no_step_in_common() -> None:
    said = told(watched(5.0, 4.0, 3.0), watched(5.0, 4.0, 3.0, warmup=9))
    assert "bf16.json was watched from step 4 to 6 and fp8.json was watched from step 10 to 12" in said
    assert "training loss" not in said


@pytest.mark.slow
def test_one_run_whose_model_gives_no_loss() -> None:
    without = replace(watched(5.0, 4.0, 3.0), observed=replace(watched(5.0).observed, losses=None))
    assert "the loss of fp8.json was not in the output of its model" in told(watched(5.0, 4.0, 3.0), without)
    assert "loss" not in told(without, without).replace("--", "")
    assert "the loss of fp8.json was not recorded" in told(watched(5.0), DECODER_468M)
