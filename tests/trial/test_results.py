"""The self-check holds an arm to its own copy, whatever became of the others; and what the cuts leave
open."""

from __future__ import annotations

import pytest
import torch

from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.copies.depth import Cut, Plan, Stack
from fp8doctor.trial.measure.attempt import Attempt, Ready, Samples
from fp8doctor.trial.measure.evidence import Compilations, StepProof
from fp8doctor.trial.measure.peak_memory import Held, Turn
from fp8doctor.trial.measure.results import _arm, _self_check, _unknown_peaks
from fp8doctor.trial.treatments.bf16 import eager_bf16
from fp8doctor.trial.variant import VariantPlan, as_it_is

AS_IS = VariantPlan("as_is", as_it_is, fp8=True)
BF16 = VariantPlan("bf16", eager_bf16, fp8=False)
REFUTED = NoNumber(Reason.FP8_IN_BF16, "3 FP8 matmuls were seen in a BF16 step")
TIMES = {"as_is": 20.0, "bf16": 10.0}


@pytest.mark.parametrize(
    ("copied", "timed", "refuted", "ratio"),
    [
        (BF16, ("as_is", "bf16"), False, 1.0),
        (BF16, ("as_is", "bf16"), True, 1.0),
        (BF16, ("as_is",), True, None),  # it raised in the window
        (AS_IS, ("as_is",), False, 1.0),
        (AS_IS, ("as_is", "bf16"), False, 1.0),
    ],
)
def test_a_copy_is_held_to_what_it_is_a_copy_of(
    copied: VariantPlan, timed: tuple[str, ...], refuted: bool, ratio: float | None
) -> None:
    attempts = [
        Attempt(AS_IS),
        Attempt(BF16, no_number=REFUTED if refuted else None),
        Attempt(VariantPlan("bf16_again", copied.make, fp8=copied.fp8)),
    ]
    samples: Samples = {(name, 0): [TIMES[name]] * 9 for name in timed}
    samples["bf16_again", 0] = [TIMES[copied.name]] * 9
    assert _self_check(attempts, samples) == ratio


PLAN = Plan((Stack("blocks", 28, 0, 1),), (Cut({"blocks": 2}), Cut({"blocks": 6})))


def at_cuts(name: str, *peaks: float | None) -> Attempt:
    """An arm whose backward began with 7 GiB and with 9 at the two cuts."""
    ready = [
        Ready(
            lambda: torch.zeros(()),
            None,
            Compilations(),
            Held(1.0, 0.0, 2.0, 1.0),
            peak,
            None,
            0.0,
            0.0,
            None,
            turn=Turn(allocated, allocated) if peak else None,
        )
        for peak, allocated in zip(peaks, (7.0, 9.0), strict=True)
    ]
    return Attempt(VariantPlan(name, as_it_is), ready)


def test_peaks_that_the_cuts_leave_open_are_a_gap() -> None:
    known, unknown = at_cuts("bf16", 7.5, 9.5), at_cuts("as_is", 10.0, 10.4)
    assert _unknown_peaks(PLAN, [known, at_cuts("bf16_compiled", None, None)]) == {}
    assert _unknown_peaks(PLAN, [known, unknown, at_cuts("bf16_again", 10.0, 10.4)]) == {
        "trial.arms.peak_gib": "with 2 and 6 blocks the peak is elsewhere in the step than at full depth, "
        "where it is in the step as you run it between 20.0 and 21.4 GiB"
    }


@pytest.mark.parametrize(
    ("rounds", "ends"), [([20.0], (None, None)), ([20.0, 30.0], (20.0, 30.0))], ids=["one round", "two"]
)
def test_one_round_has_no_interval(rounds: list[float], ends: tuple[float | None, float | None]) -> None:
    """Where the budget was used up after it: "± 0.0 ms" would say that the time is exact."""
    attempt = at_cuts("as_is", None, None)
    attempt.proof = StepProof(fp8_gemms=0, graphs_run=0)
    arm = _arm(PLAN, attempt, {("as_is", 0): rounds, ("as_is", 1): rounds})
    assert (arm.rounds_ms, arm.low_ms, arm.high_ms) == (tuple(rounds), *ends)
