"""What a step holds in memory, in words, and the batch that fits for sure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.memory import USABLE, largest_batch, memory_in_words
from fp8doctor.facts import Facts
from fp8doctor.facts.trial import MemoryParts
from tests.facts_of import DECODER_468M
from tests.test_recorded import RECORDED


def decoder(**parts: float) -> Facts:
    """The decoder of the recording, as if its peak had these parts."""
    facts = load_report(RECORDED / "h200-decoder_454m.json.gz").facts
    made = MemoryParts(**parts)
    peak = sum(parts.values())
    arms = tuple(
        replace(each, memory=made, peak_gib=peak) if each.name == "as_is" else each
        for each in facts.trial.arms
    )
    return replace(facts, trial=replace(facts.trial, arms=arms))


PARTS = {
    "weights_gib": 10.0,
    "fp8_copies_gib": 0.0,
    "gradients_gib": 10.0,
    "optimizer_gib": 20.0,
    "activations_gib": 30.0,
}


def test_the_parts_add_up_to_the_peak_beside_the_gpu() -> None:
    told = memory_in_words(decoder(**PARTS))
    assert told.startswith("70.0 of 140.4 GiB at the peak (weights 10.0, gradients 10.0, optimizer 20.0, ")
    assert told.endswith("activations 30.0); at least 41 samples fit (estimated)")


@pytest.mark.parametrize("activations", [0.2, 30.0, 90.0])
def test_the_batch_that_fits_is_a_lower_bound(activations: float) -> None:
    """Whatever grows with the batch, activations alone or all that the optimizer does not hold."""
    facts = decoder(**{**PARTS, "activations_gib": activations})
    now = arm(facts.trial, "as_is")
    assert now is not None
    most = largest_batch(now, facts)
    room = USABLE * (facts.gpus[0].memory_gib or 0.0)
    grown = 30.0 + (10.0 + activations) * (most or 16) / 16
    assert most is None or grown <= room
    assert (most is None) == (30.0 + (10.0 + activations) * 17 / 16 > room)


def test_without_a_trial_activations_are_not_guessed() -> None:
    told = memory_in_words(replace(DECODER_468M, gpus=()))
    assert told == "weights, gradients and optimizer state 3.5 GiB (estimated); activations unknown"
