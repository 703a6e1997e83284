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


def test_a_treatment_called_after_bf16_changes_a_step_in_fp8() -> None:
    kept = ran("keep-in-bf16", 80.0, treatments=("keep-in-bf16",), base=ArmName.AS_IS)
    assert held(kept) == ("bf16_compiled", True, False)


def test_what_helps_bf16_too_is_not_held_to_a_bf16_without_it() -> None:
    assert held(ran("autocast-bf16", 80.0, treatments=("autocast-bf16",), base=ArmName.AS_IS)) is None


def test_what_is_built_on_a_change_that_helps_bf16_too_is_not_held_to_a_bf16_without_it() -> None:
    adapters = ran(ArmName.PRESCRIBED, 80.0, treatments=("adapters-to-bf16",), base=ArmName.AS_IS)
    recipe = ran("te-block", 70.0, treatments=("te-block",), base=ArmName.PRESCRIBED)
    assert held(recipe, adapters) is None
    assert held(recipe) == ("bf16_compiled", True, False), "what it is built on has no arm"


def test_a_step_without_adapters_is_not_held_to_a_bf16_that_has_them() -> None:
    assert held(ran(ArmName.WITHOUT_ADAPTERS, 70.0, base=ArmName.AS_IS)) is None
