"""The step of a watched script, profiled and without a trial, in the eyes of the checks of this area."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor.checks.step.fp32_matmul import fp32_matmul
from fp8doctor.checks.step.host_bound import host_bound
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import NOT_RECORDED, Facts, Observation
from fp8doctor.finding import Finding
from tests.checks.step.profiled import breakdown
from tests.facts_of import DECODER_468M

STEP_MS = 100.0


def watched(host_wait_pct: float = 90.0, *, seen: dict[str, Any] | None = None, **families: float) -> Facts:
    observed = Observation(
        steps_ms=(STEP_MS,) * 10,
        clock="cuda",
        data_ms=None,
        before_forward_ms=None,
        fp8_gemms=12,
        graphs_run=0,
        host_copies_ms=0.0,
        breakdown=breakdown(STEP_MS, host_wait_pct=host_wait_pct, **families),
    )
    return replace(DECODER_468M, observed=replace(observed, **(seen or {})))


def test_a_gpu_that_waits_for_its_host() -> None:
    finding = host_bound(watched(gemm_fp8=20.0, cast=10.0))
    assert isinstance(finding, Finding)
    assert finding.title == "The GPU is idle for 70% of the step, waiting for the host"


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({"behind_ms": (40.0,) * 10}, id="the host is ahead"),
        pytest.param({"data_ms": (65.0,) * 10}, id="it waits for data"),
        pytest.param({"clock": "host"}, id="a CPU"),
    ],
)
def test_a_gpu_that_does_not_wait_for_launches(seen: dict[str, Any]) -> None:
    facts = watched(gemm_fp8=20.0, cast=10.0, seen=seen)
    if seen.get("clock") == "host":
        assert "STP001" not in {each.code for each in diagnose(facts).findings}
    else:
        assert host_bound(facts) is None


def test_gemms_in_fp32() -> None:
    finding = fp32_matmul(watched(gemm_fp8=40.0, gemm_fp32=30.0, pointwise=28.0))
    assert isinstance(finding, Finding)
    assert finding.title == "Matmuls in fp32 take 30.0 ms, 30% of the step"


def test_gemms_in_fp32_of_a_step_whose_autocast_nobody_saw() -> None:
    facts = watched(gemm_fp8=40.0, gemm_fp32=30.0, pointwise=28.0)
    unseen = replace(facts, training=replace(facts.training, autocast=NOT_RECORDED))
    finding = fp32_matmul(unseen)
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert "torch.autocast" in finding.treatment.code


def test_copies_from_the_host_come_first() -> None:
    facts = watched(seen={"host_copies_ms": 25.0}, gemm_fp8=40.0, copy=25.0, pointwise=30.0)
    assert "copies from the host" in diagnose(facts).answer.causes[0].title
    waits = diagnose(watched(seen={"data_ms": (30.0,) * 10}, gemm_fp8=40.0)).answer.causes[0].title
    assert "its data" in waits
