"""The most that FP8 can give, from breakdowns composed in the proportions of measured ones."""

import pytest

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import Arm
from tests.checks.arms import ran, timed
from tests.checks.step.profiled import BF16, COMPILED, FP8_COMPILED, FP8_EAGER, replaced
from tests.facts_of import DECODER_468M


def bound(*arms: Arm, device: str = "cuda") -> float | None:
    return TrialView(timed(DECODER_468M, BF16, *arms, device=device)).bound


def test_the_gemms_of_the_fastest_fp8_step_bound_it() -> None:
    assert bound(FP8_EAGER, FP8_COMPILED) == pytest.approx(92.7 / (92.7 - 62.4 + 36.3))


def test_without_fp8_gemms_they_take_half_the_time() -> None:
    fp8 = ran("as_is", 366.1, breakdown=None), ran("prescribed", 88.3, **COMPILED, breakdown=None)
    assert bound(*fp8) == pytest.approx(92.7 / (92.7 - 62.4 / 2))


def test_a_step_that_was_measured_faster_is_not_denied() -> None:
    slow = replaced(FP8_COMPILED, families_ms={"gemm_fp8": 60.0})
    assert bound(FP8_EAGER, slow) == pytest.approx(92.7 / 88.3)


def test_a_cpu_says_nothing_about_a_gpu() -> None:
    assert bound(FP8_EAGER, device="cpu") is None
