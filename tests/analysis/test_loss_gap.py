"""How far two losses are apart, in multiples of what a last bit does, from curves written down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.analysis.loss_gap import COARSER, loss_gap, loss_in_words, non_finite_from
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, LossCurve, Trial
from fp8doctor.render.text import render
from tests.diagnosis.trials import SLOW, Of

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
    facts = with_losses(Trial(losses=()), gaps={"trial.losses": "the batch is made up"})
    assert "The loss was not followed: the batch is made up." in " ".join(
        render(diagnose(facts), verbose=True).split()
    )
