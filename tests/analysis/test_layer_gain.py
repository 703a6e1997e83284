"""What FP8 gives a layer: as timed where it was, else as modelled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fp8doctor.analysis.layer_gain import LEAST_IN_STEP, gains, modelled_casts_ms
from fp8doctor.cost import gpu_spec, memory_ms
from fp8doctor.facts import Facts, Network, Trial, Unrecorded
from fp8doctor.recipes import RECIPES, Recipe, runs_on
from tests.analysis.gains import NARROW, WIDE, facts, linear, shape, timed


def test_wide_layers_gain_and_narrow_ones_lose_by_the_model() -> None:
    found = gains(facts(WIDE, NARROW))
    assert (found["up"].ms > 0, found["up"].loses) == (True, False)
    assert (found["k"].ms < 0, found["k"].loses) == (True, True)
    assert (found["k"].measured, found["k"].gpu) == (False, "H200")


def test_what_was_timed_stands_before_the_model() -> None:
    trial = timed(shape("up", bf16=1.0, fp8=0.9, casts=1.1), shape("k", bf16=1.0, fp8=0.5, casts=0.2))
    found = gains(facts(WIDE, NARROW, trial=trial, accumulate=4))
    assert found["up"].ms == pytest.approx(4 * (1.0 - 0.9 - 1.1))
    assert (found["up"].loses, found["k"].loses) == (True, False)
    assert (found["up"].measured, found["up"].gpu) == (True, "NVIDIA H200")


@pytest.mark.parametrize(("casts", "loses"), [(0.17 / LEAST_IN_STEP, False), (0.19 / LEAST_IN_STEP, True)])
def test_casts_timed_alone_are_fewer_in_a_step(casts: float, loses: bool) -> None:
    """The fewest make 0.85 more than 1.03, or not."""
    found = gains(facts(WIDE, trial=timed(shape("up", bf16=1.0, fp8=0.85, casts=casts))))
    assert found["up"].ms < 0
    assert found["up"].loses is loses


def test_casts_that_took_far_longer_alone_than_in_any_step_accuse_nobody() -> None:
    """Seen on an H200: 2048 x 2048 took 0.29 ms in one process and 0.57 in another, as the compiler chose its
    tiles; in the steps 0.19."""
    modelled = gains(facts(WIDE))["up"].casts_ms
    found = gains(facts(WIDE, trial=timed(shape("up", bf16=1.0, fp8=0.6, casts=2.0))))["up"]
    assert (found.least_casts_ms, found.loses) == (modelled, False)


def test_what_was_timed_on_a_cpu_is_modelled() -> None:
    trial = timed(shape("up", bf16=1.0, fp8=9.0, casts=9.0), device="cpu")
    assert gains(facts(WIDE, trial=trial)) == gains(facts(WIDE))


def test_gemms_whose_casts_are_missing_keep_their_times() -> None:
    (found,), (modelled,) = (
        gains(facts(WIDE, trial=trial)).values()
        for trial in (timed(shape("up", bf16=1.0, fp8=0.6, casts=None)), None)
    )
    assert (found.bf16_ms, found.fp8_ms, found.gpu) == (1.0, 0.6, "NVIDIA H200")
    assert (found.casts_ms, found.margin, found.measured) == (modelled.casts_ms, modelled.margin, False)


def test_the_rows_that_the_trial_saw_stand_before_the_tokens() -> None:
    trial = Trial(device="cuda", gpu="NVIDIA H200", rows={"k": (64, 64, 32)})
    found, few = gains(facts(WIDE, NARROW, trial=trial, accumulate=4)), gains(facts(NARROW, tokens=64))
    assert found["up"] == gains(facts(WIDE, accumulate=4))["up"]
    assert (found["k"].bf16_ms, found["k"].times, few["k"].times) == (few["k"].bf16_ms, 4 * 2, 1)


@pytest.mark.parametrize(
    "odd",
    [{"role": "experts"}, {"recipe": "mxfp8"}, {"recipe": None}, {"features": {"emulate": True}}],
    ids=["experts", "another recipe", "no recipe", "emulated"],
)
def test_layers_that_are_not_judged(odd: dict[str, Any]) -> None:
    assert gains(facts(linear("k", 2048, 64, **odd))) == {}


def test_nothing_is_judged_without_tokens_without_fp8_or_off_the_multiples_of_16() -> None:
    assert (
        gains(facts(NARROW, tokens=None))
        == gains(facts(NARROW, gpu="A100"))
        == gains(facts(linear("k", 2048, 1000)))
        == gains(Facts(network=Network(linears=())))
        == {}
    )
    with pytest.raises(Unrecorded, match=r"Facts\.network"):
        gains(Facts())


@pytest.mark.parametrize("of", [each for each in RECIPES.values() if each.cast_bytes])
def test_a_frozen_layer_casts_its_activations_in_one_layout(of: Recipe) -> None:
    rows, gpu = 65536, gpu_spec("H200" if runs_on(of, (9, 0)) else "B200")
    wide = msgspec.structs.replace(linear("up", 4096, 4096, recipe=of.name), stack=of.stack)
    trained, frozen = (
        modelled_casts_ms(msgspec.structs.replace(wide, requires_grad=each), rows, gpu)
        for each in (True, False)
    )
    once = memory_ms(3.0 * rows * (4096 + 4096), gpu)
    assert once < frozen
    assert frozen == trained if of.weight_gradient_in_16_bits else frozen < 0.85 * trained
