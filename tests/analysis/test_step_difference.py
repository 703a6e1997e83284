"""Why a step takes longer: parts that add up, from breakdowns composed in the proportions of measured
ones."""

import itertools

import pytest

from fp8doctor.analysis.step_difference import waits_for_the_host, waterfall
from fp8doctor.facts import Arm
from tests.checks.arms import ran
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, profiled, replaced


def test_uncompiled_casts_are_the_difference() -> None:
    found = waterfall(FP8_EAGER, BF16)
    assert found is not None
    assert found.difference_ms == pytest.approx(273.4)
    assert found.parts_ms["GEMMs"] == pytest.approx(-33.0)
    assert "casts" in found.parts_ms


def test_casts_that_do_norms_as_well_are_one_part_with_them() -> None:
    found = waterfall(FP8_COMPILED, BF16)
    assert found is not None
    assert found.parts_ms["casts and norms"] == pytest.approx(23.7 + 9.7 - 12.4)
    assert sum(found.parts_ms.values()) == pytest.approx(found.difference_ms)


def test_either_step_may_be_the_first() -> None:
    for of, against in itertools.permutations((FP8_EAGER, FP8_COMPILED, BF16), 2):
        found, mirrored = waterfall(of, against), waterfall(against, of)
        assert found
        assert mirrored
        assert found.parts_ms == pytest.approx({part: -ms for part, ms in mirrored.parts_ms.items()})


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
