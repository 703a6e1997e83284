"""STP004: real steps on the CPU, with a head in fp32 and in BF16."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from fp8doctor.checks.step.fp32_matmul import fp32_matmul
from fp8doctor.facts import ArmCut, Facts, KernelGroup
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import discover, run, select
from tests.checks.step.conftest import families_of, with_arms
from tests.checks.step.profiled import profiled, replaced, unprofiled

pytestmark = pytest.mark.slow


def test_a_head_in_fp32_is_named(sick: Facts) -> None:
    finding = fp32_matmul(sick)
    assert isinstance(finding, Finding)
    assert finding.evidence["gemm_fp32_ms"] == pytest.approx(families_of(sick)["gemm_fp32"])
    assert (finding.evidence["modules"], finding.evidence["fp32_linears"]) == (("head",), 1)
    assert "The launching modules: model.head (" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.name == "autocast-bf16"


def test_a_head_in_bf16_is_healthy(treated: Facts) -> None:
    assert families_of(treated)["gemm_16bit"] > 0
    assert fp32_matmul(treated) is None


def test_compiled_regions_name_no_module_but_the_weights_are_known(sick: Facts) -> None:
    finding = fp32_matmul(with_arms(sick, replaced(sick.trial.arms[0], modules=())))
    assert isinstance(finding, Finding)
    assert finding.explanation.endswith("1 Linear has fp32 weights; the first is model.head.")
    assert finding.evidence["modules"] == ("head",)


def test_a_product_that_upcasts_under_autocast(sick: Facts) -> None:
    training = msgspec.structs.replace(sick.training, autocast="bfloat16")
    linears = tuple(msgspec.structs.replace(each, dtype="bfloat16") for each in sick.network.linears)
    facts = msgspec.structs.replace(
        sick, training=training, network=msgspec.structs.replace(sick.network, linears=linears)
    )
    finding = fp32_matmul(with_arms(facts, replaced(facts.trial.arms[0], modules=())))
    assert isinstance(finding, Finding)
    assert finding.explanation.endswith(
        "No Linear has fp32 weights: the operands are converted to fp32 before the product."
    )
    assert finding.treatment is not None
    assert finding.treatment.name == "product-in-bf16"


SOFTMAX = KernelGroup(
    name="triton_red_fused__safe_softmax_add_exp_native_dropout_3",
    family="attention",
    operator=None,
    count=24,
    time_ms=8.0,
)
BATCHED = KernelGroup(
    name="sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8",
    family="gemm_fp32",
    operator="aten::bmm",
    count=144,
    time_ms=13.5,
)
HEAD = KernelGroup(
    name="sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8",
    family="gemm_fp32",
    operator="aten::mm",
    count=3,
    time_ms=4.5,
)


def compiled(facts: Facts, *groups: KernelGroup) -> Facts:
    """A compiled step of 100 ms, where no operator of torch's attention stands around its kernels."""
    families: dict[str, float] = defaultdict(float, gemm_fp8=40.0)
    for group in groups:
        families[group.family] += group.time_ms
    arm = profiled("as_is", 100.0, arm={"graphs_run": 24, "cuts": (ArmCut(step_ms=100.0),)}, **families)
    return with_arms(facts, replaced(arm, groups=groups))


def test_gemms_of_torchs_math_attention_are_not_claimed(treated: Facts) -> None:
    """MEM004 speaks of them: no autocast reaches them."""
    facts = compiled(treated, BATCHED, SOFTMAX)
    assert fp32_matmul(facts) is None
    (finding,), _ = run(select(discover(), ["MEM004", "STP004"]), facts)
    assert finding.code == "MEM004"
    finding = fp32_matmul(compiled(treated, BATCHED, SOFTMAX, HEAD))
    assert isinstance(finding, Finding)
    assert finding.evidence["gemm_fp32_ms"] == pytest.approx(4.5)


def test_batched_gemms_without_a_softmax_are_claimed(treated: Facts) -> None:
    finding = fp32_matmul(compiled(treated, BATCHED))
    assert isinstance(finding, Finding)
    assert finding.evidence["gemm_fp32_ms"] == pytest.approx(13.5)


def test_a_small_share_is_left_alone(sick: Facts) -> None:
    assert fp32_matmul(with_arms(sick, profiled("as_is", 100.0, gemm_fp8=80.0, gemm_fp32=2.9))) is None


def test_there_is_no_answer(sick: Facts) -> None:
    assert isinstance(fp32_matmul(with_arms(sick, unprofiled("as_is", 100.0))), NotApplicable)
    assert isinstance(
        fp32_matmul(msgspec.structs.replace(sick, trial=msgspec.structs.replace(sick.trial, device="cpu"))),
        NotApplicable,
    )
