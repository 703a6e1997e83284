"""A timed step is held to the best BF16 of its like, and only one in FP8 gains or loses by that."""

from __future__ import annotations

import pytest

from fp8doctor.analysis.outcome import relative_to_bf16
from fp8doctor.facts import Arm
from fp8doctor.facts.arm_names import ArmName
from tests.checks.arms import ran, timed
from tests.facts_of import DECODER_468M

BF16 = ran(ArmName.BF16, 100.0)
COMPILED = ran(ArmName.BF16_COMPILED, 90.0)


def held(arm: Arm, *others: Arm) -> tuple[str, bool, bool] | None:
    found = relative_to_bf16(timed(DECODER_468M, BF16, COMPILED, arm, *others), arm)
    return (found.bf16.name, found.gains, found.loses) if found else None


@pytest.mark.parametrize(("ms", "gains", "loses"), [(80.0, True, False), (120.0, False, True)])
def test_a_step_in_fp8_gains_or_loses(ms: float, gains: bool, loses: bool) -> None:
    assert held(ran(ArmName.AS_IS, ms)) == ("bf16_compiled", gains, loses)


def test_a_step_in_bf16_does_neither() -> None:
    assert held(BF16) == ("bf16_compiled", False, False)


def test_a_step_without_adapters_is_not_held_to_a_bf16_that_has_them() -> None:
    assert held(ran(ArmName.WITHOUT_ADAPTERS, 70.0, base=ArmName.AS_IS)) is None
