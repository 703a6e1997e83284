"""STP007: real steps on the CPU, with AdamW in a loop and fused."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.checks.step.optimizer_bound import optimizer_bound
from fp8doctor.facts import Facts, KernelGroup
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran
from tests.checks.step.conftest import families_of, with_arms
from tests.checks.step.profiled import breakdown, profiled, replaced, unprofiled

pytestmark = pytest.mark.slow

FOREACH = KernelGroup(
    name="multi_tensor_apply_kernel<BinaryOpListAlphaFunctor>",
    family="optimizer",
    operator="aten::_foreach_lerp_",
    count=96,
    time_ms=9.0,
)
FUSED = KernelGroup(
    name="multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    family="optimizer",
    operator="aten::_fused_adamw_",
    count=4,
    time_ms=9.0,
)


def test_a_loop_over_the_parameters(sick: Facts) -> None:
    finding = optimizer_bound(sick)
    assert isinstance(finding, Finding)
    assert finding.title.startswith("AdamW takes ")
    assert finding.evidence["optimizer_ms"] == pytest.approx(families_of(sick)["optimizer"])
    assert "aten::addcdiv_" in finding.evidence["kernels"]  # type: ignore[operator]
    assert finding.treatment is not None
    assert finding.treatment.name == "fused-optimizer"
    assert "fused=True" in finding.treatment.code


def test_the_fused_one_is_healthy(treated: Facts) -> None:
    assert families_of(treated)["optimizer"] > 0
    found = treated.trial.arms[0].breakdown
    assert found
    assert any("fused" in group.name for group in found.groups if group.family == "optimizer")
    assert (
        optimizer_bound(
            with_arms(
                treated,
                replaced(
                    treated.trial.arms[0], families_ms={**found.families_ms, "optimizer": found.busy_ms}
                ),
            )
        )
        is None
    )


@pytest.mark.parametrize(("group", "fires"), [(FOREACH, True), (FUSED, False)], ids=["foreach", "fused"])
def test_kernels_tell(sick: Facts, group: KernelGroup, fires: bool) -> None:
    arm = replaced(profiled("as_is", 100.0, gemm_fp8=80.0, optimizer=9.0), groups=(group,))
    assert isinstance(optimizer_bound(with_arms(sick, arm)), Finding) is fires


def test_the_trial_knows_by_the_settings(sick: Facts) -> None:
    """It makes an arm of every optimizer that could be fused and is not; its kernels may be too short to be
    among the longest."""
    arm = profiled("as_is", 100.0, gemm_fp8=80.0, optimizer=9.0)
    assert optimizer_bound(with_arms(sick, arm)) is None
    faster = ran("fused-optimizer", 94.0, treatments=("fused-optimizer",), base="as_is", breakdown=None)
    assert isinstance(optimizer_bound(with_arms(sick, arm, faster)), Finding)


@pytest.mark.parametrize(
    "optimizer",
    ["bitsandbytes.optim.adamw.AdamW8bit", "library.of.someone.AdamW", "torch.optim.rmsprop.RMSprop"],
)
def test_an_optimizer_without_a_fused_form_is_left_alone(sick: Facts, optimizer: str) -> None:
    facts = msgspec.structs.replace(
        sick, training=msgspec.structs.replace(sick.training, optimizer=optimizer)
    )
    assert optimizer_bound(facts) is None


def test_a_small_share_is_left_alone(sick: Facts) -> None:
    arm = replaced(profiled("as_is", 100.0, gemm_fp8=80.0, optimizer=4.9), groups=(FOREACH,))
    assert optimizer_bound(with_arms(sick, arm)) is None


def test_without_fp8_it_is_information(sick: Facts) -> None:
    linears = tuple(msgspec.structs.replace(each, use="none") for each in sick.network.linears)
    finding = optimizer_bound(
        msgspec.structs.replace(sick, network=msgspec.structs.replace(sick.network, linears=linears))
    )
    assert isinstance(finding, Finding)
    assert finding.severity == "info"


def test_there_is_no_answer(sick: Facts) -> None:
    assert isinstance(optimizer_bound(with_arms(sick, unprofiled("as_is", 100.0))), NotApplicable)
    unreliable = msgspec.structs.replace(breakdown(100.0, optimizer=50.0), reliable=False)
    assert isinstance(optimizer_bound(with_arms(sick, ran("as_is", breakdown=unreliable))), NotApplicable)
    assert isinstance(
        optimizer_bound(
            msgspec.structs.replace(sick, trial=msgspec.structs.replace(sick.trial, device="cpu"))
        ),
        NotApplicable,
    )
