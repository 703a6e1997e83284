"""Why a step takes longer: parts that add up, from breakdowns composed in the proportions of measured
ones."""

from __future__ import annotations

import pytest

from fp8doctor.analysis.step_difference import (
    waits_for_the_host,
    waterfall,
)
from fp8doctor.facts import Arm
from tests.checks.arms import ran
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, profiled, replaced


def test_uncompiled_casts_are_the_difference() -> None:
    found = waterfall(FP8_EAGER, BF16)
    assert found is not None
    assert found.difference_ms == pytest.approx(273.4)
    assert found.parts_ms["GEMMs"] == pytest.approx(-33.0)
    assert found.fused_ms == 0


def test_what_a_fused_cast_kernel_does_besides_is_no_cost_of_the_casts() -> None:
    found = waterfall(FP8_COMPILED, BF16)
    assert found is not None
    assert found.fused_ms == pytest.approx(12.4 - 9.7)
    assert found.parts_ms["casts"] == pytest.approx(23.7 - 2.7)
    assert found.parts_ms["norms and pointwise"] == pytest.approx(0.0)


def test_no_more_is_taken_off_than_the_casts_cost() -> None:
    fp8 = profiled("as_is", 80.0, arm={"graphs_run": 24}, gemm_fp8=40.0, cast=3.0, pointwise=2.0)
    bf16 = profiled("bf16", 100.0, gemm_16bit=70.0, pointwise=20.0)
    found = waterfall(fp8, bf16)
    assert found is not None
    assert found.parts_ms["casts"] == 0
    assert found.parts_ms["norms and pointwise"] == pytest.approx(-15.0)


@pytest.mark.parametrize("arm", [ran("as_is", 100.0, breakdown=None), replaced(FP8_EAGER, reliable=False)])
def test_without_two_reliable_breakdowns_it_is_unknown(arm: Arm) -> None:
    assert waterfall(arm, BF16) is None
    assert waterfall(FP8_EAGER, arm) is None


@pytest.mark.parametrize(
    ("idle_ms", "host_wait_pct", "waits"),
    [(14.0, 87.0, True), (14.0, 20.0, False), (14.0, None, False), (2.0, 87.0, False)],
    ids=["launches are late", "the gaps have another cause", "no gap was seen", "the GPU is busy"],
)
def test_idle_time_is_the_hosts_when_launches_come_late(
    idle_ms: float, host_wait_pct: float | None, waits: bool
) -> None:
    arm = profiled("as_is", 36.8, gemm_fp8=36.8 - idle_ms, host_wait_pct=host_wait_pct)
    assert waits_for_the_host(arm) is waits
