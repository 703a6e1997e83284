"""Why a step takes longer: parts that add up, from breakdowns composed in the proportions of measured
ones."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.analysis.step_difference import (
    PARTS,
    breakdown_of,
    waits_for_the_host,
    waterfall,
    why_unknown,
)
from fp8doctor.facts import Arm, ArmCut, KernelGroup, Unrecorded
from fp8doctor.wording import minus
from tests.checks.arms import ran
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, profiled, replaced, unprofiled


def test_uncompiled_casts_are_the_difference() -> None:
    found = waterfall(FP8_EAGER, BF16)
    assert found is not None
    assert found.difference_ms == pytest.approx(273.4)
    assert found.gemms_saved_ms == pytest.approx(33.0)
    assert found.casts_unpaid_ms == pytest.approx(273.6 - 33.0)
    assert found.fused_ms == 0


def test_what_a_fused_cast_kernel_does_besides_is_no_cost_of_the_casts() -> None:
    found = waterfall(FP8_COMPILED, BF16)
    assert found is not None
    assert found.fused_ms == pytest.approx(12.4 - 9.7)
    assert found.parts_ms["casts"] == pytest.approx(23.7 - 2.7)
    assert found.parts_ms["norms and pointwise"] == pytest.approx(0.0)
    assert found.casts_unpaid_ms == 0


def test_uncompiled_casts_fuse_with_nothing() -> None:
    found = waterfall(msgspec.structs.replace(FP8_COMPILED, graphs_run=0), BF16)
    assert found is not None
    assert found.fused_ms == 0
    assert found.parts_ms["casts"] == pytest.approx(23.7)


def test_no_more_is_taken_off_than_the_casts_cost() -> None:
    fp8 = profiled("as_is", 80.0, arm={"graphs_run": 24}, gemm_fp8=40.0, cast=3.0, pointwise=2.0)
    bf16 = profiled("bf16", 100.0, gemm_16bit=70.0, pointwise=20.0)
    found = waterfall(fp8, bf16)
    assert found is not None
    assert found.parts_ms["casts"] == 0
    assert found.parts_ms["norms and pointwise"] == pytest.approx(-15.0)


families = st.fixed_dictionaries(
    {family: st.floats(0, 300) for part in PARTS.values() for family in part} | {"unknown": st.floats(0, 300)}
)


@pytest.mark.slow
@given(families, families, st.floats(0.1, 3000), st.floats(0.1, 3000))
def test_the_parts_add_up_to_the_difference_of_the_steps(
    fp8: dict[str, float], bf16: dict[str, float], step: float, other: float
) -> None:
    found = waterfall(profiled("as_is", step, **fp8), profiled("bf16", other, **bf16))
    assert found is not None
    assert sum(found.parts_ms.values()) == pytest.approx(minus(step, other), abs=1e-6)


def test_what_no_rule_knows_is_unclassified() -> None:
    found = waterfall(
        profiled("as_is", 100.0, gemm_fp8=50.0, unknown=7.0), profiled("bf16", 100.0, gemm_16bit=50.0)
    )
    assert found is not None
    assert found.parts_ms["unclassified"] == pytest.approx(7.0)
    assert found.parts_ms["idle"] == pytest.approx(-7.0)


UNKNOWN = {
    "never profiled": (unprofiled("as_is", 100.0), "was not profiled"),
    "unreliable": (replaced(FP8_EAGER, reliable=False), "has no reliable breakdown"),
}


@pytest.mark.parametrize(("arm", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_without_two_breakdowns_it_is_unknown(arm: Arm, reason: str) -> None:
    assert breakdown_of(arm) is None
    assert waterfall(arm, BF16) is None
    assert waterfall(FP8_EAGER, arm) is None
    assert why_unknown(arm) == reason


def test_what_was_recorded_before_there_were_breakdowns_is_no_step_that_was_not_profiled() -> None:
    for arms in ((ran("as_is", 100.0), BF16), (FP8_EAGER, ran("bf16", 100.0))):
        with pytest.raises(Unrecorded, match=r"Arm\.breakdown"):
            waterfall(*arms)


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


@pytest.mark.parametrize(("low_ms", "waits"), [(375.9, False), (400.0, True)])
def test_a_host_that_others_disturb_is_not_the_jobs(low_ms: float, waits: bool) -> None:
    """Seen on an H200: the 468 M decoder beside three other trials on one host, 406.5 ms (375.9 to 437) with
    the GPU busy for 356.6."""
    arm = profiled(
        "as_is", 406.5, host_wait_pct=93.4, arm={"low_ms": low_ms}, cast=282.8, gemm_fp8=30.7, pointwise=43.1
    )
    assert waits_for_the_host(arm) is waits


def test_attentions_own_products_are_attention_in_compiled_graphs_too() -> None:
    """Seen on an H200, T5: the same fp32 products stood under attention in the eager step and under GEMMs in
    the compiled one."""
    groups = (
        KernelGroup(
            name="sm80_xmma_gemm_f32f32", family="gemm_fp32", operator="aten::bmm", count=144, time_ms=13.8
        ),
        KernelGroup(
            name="triton_red_fused__safe_softmax", family="attention", operator="t", count=11, time_ms=8.0
        ),
    )
    arm = profiled(
        "bf16_compiled",
        48.4,
        arm={"cuts": (ArmCut(blocks={}, step_ms=48.4),)},
        gemm_16bit=10.9,
        gemm_fp32=13.8,
        attention=13.0,
        pointwise=8.8,
    )
    found = breakdown_of(replaced(arm, groups=groups, busy_ms=46.5))
    assert found is not None
    assert (found.families_ms["gemm_fp32"], found.families_ms["attention"]) == (
        pytest.approx(0.0),
        pytest.approx(26.8),
    )
    assert sum(found.families_ms.values()) == pytest.approx(46.5)


def test_uncompiled_fp8_at_many_tokens_does_not_wait_for_the_host() -> None:
    assert not waits_for_the_host(replaced(FP8_EAGER, host_wait_pct=100.0))


def test_steps_alike_have_no_parts() -> None:
    same = waterfall(msgspec.structs.replace(BF16, name="bf16"), BF16)
    assert same is not None
