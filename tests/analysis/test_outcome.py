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


def test_a_step_of_the_first_window_is_held_to_the_bf16_of_that_window() -> None:
    """In which the host, or the clocks, may have been others."""
    first = [ran("as_is_first", 60.0), ran("bf16_first", 52.0), ran("bf16_compiled_first", 45.0)]
    rowwise = ran("recipe-rowwise", 50.0, treatments=("recipe-rowwise",), base="as_is_first")
    graphs = ran("bf16_cuda_graphs", 30.0, base="bf16_compiled_first")
    fp8 = ran("cuda-graphs", 40.0, treatments=("cuda-graphs",), base="as_is_first")
    as_is, others = ran(ArmName.AS_IS, 120.0), (*first, graphs)
    assert held(rowwise, as_is, *others) == ("bf16_compiled_first", False, True)
    assert held(graphs, as_is, *first) == ("bf16_compiled_first", False, False)
    assert held(fp8, as_is, *others) == ("bf16_cuda_graphs", False, True)
    assert held(as_is, *others) == ("bf16_compiled", False, True)
    again = [ran("bf16_cuda_graphs", 70.0, base="bf16_compiled"), ran("bf16_cuda_graphs_first", 30.0)]
    assert held(fp8, as_is, *first, *again) == ("bf16_cuda_graphs_first", False, True)
    assert held(rowwise, as_is) == ("bf16_compiled", True, False), "no other window is known"


def test_a_step_without_adapters_is_not_held_to_a_bf16_that_has_them() -> None:
    assert held(ran(ArmName.WITHOUT_ADAPTERS, 70.0, base=ArmName.AS_IS)) is None
