"""The self-check holds an arm to its own copy, whatever became of the others."""

from __future__ import annotations

import pytest

from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.measure.attempt import Attempt, Samples
from fp8doctor.trial.measure.results import _self_check
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
