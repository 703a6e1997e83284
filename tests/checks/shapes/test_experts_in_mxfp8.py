"""Without a trial: experts in MXFP8, held to the times that were published of them."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.checks.shapes.gemms_too_small import gemms_too_small, of_experts
from fp8doctor.cost import gpu_spec, mxfp8_experts, routed_rows
from fp8doctor.facts import NOT_RECORDED, Facts, Linear, Network, Workload
from fp8doctor.finding import Finding


def experts(
    rows: int, k: int, n: int, count: int, *, stack: str = "transformer_engine", source: str = "given"
) -> Facts:
    layer = Linear(
        name="experts.w1",
        stack=stack,
        use="training",
        recipe="mxfp8",
        features={},
        in_features=k,
        out_features=n,
        gemms=count,
        requires_grad=True,
        role="experts",
    )
    workload = Workload(batch_source=source, tokens=rows, rows={"experts.w1": (rows,)}, accumulate=1)
    return Facts(assumed_gpu="B200", network=Network(linears=(layer,)), workload=workload)


@pytest.mark.parametrize(
    ("shape", "published_ms"),
    [
        ((128_000, 5120, 8192, 2), 39.4876),
        ((128_000, 5120, 8192, 8), 37.7007),
        ((128_000, 7168, 2048, 2), 14.9002),
        ((128_000, 7168, 2048, 8), 14.9668),
        ((128_000, 5120, 1536, 4), 6.4552),
    ],
)
def test_grouped_gemms_in_bf16_take_about_what_was_published(
    shape: tuple[int, int, int, int], published_ms: float
) -> None:
    facts = experts(*shape)
    cost = mxfp8_experts(facts.network.linears[0], facts, gpu_spec("B200"))
    assert cost is not None
    assert cost.bf16_ms == pytest.approx(published_ms, rel=0.17)


def test_gemms_and_casts_of_mxfp8_take_what_torchao_published() -> None:
    facts = experts(131_072, 7168, 2048, 8, stack="torchao")
    cost = mxfp8_experts(facts.network.linears[0], facts, gpu_spec("B200"))
    assert cost is not None
    assert cost.fp8_ms == pytest.approx(6.089, rel=0.01)
    assert cost.casts_ms == pytest.approx(2.226, rel=0.03)


def test_experts_of_few_rows_are_told() -> None:
    """Qwen3 30B-A3B, which was slower in MXFP8: NVIDIA-NeMo/Megatron-Bridge#2842."""
    finding = gemms_too_small(experts(32_768, 2048, 1536, 128))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert finding.evidence["rows_of_each"] == 256
    assert finding.title.endswith("(estimated)")
    assert finding.explanation.startswith("Estimated for B200")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (experts(131_072, 5120, 8192, 8, stack="torchao"), "Llama 4, 1.7x"),
        (experts(131_072, 7168, 2048, 8, stack="torchao"), "DeepSeek-V3 671B, 1.4x"),
        (experts(32_768, 2048, 1536, 128, source="made up"), "its rows are not the user's"),
        (
            msgspec.structs.replace(experts(32_768, 2048, 1536, 128), assumed_gpu="H100"),
            "there is no MXFP8 on Hopper, and no number of it",
        ),
    ],
)
def test_what_gains_or_is_not_known_is_not_told(facts: Facts, why: str) -> None:
    assert of_experts(facts) is None, why


def test_rows_that_nobody_counted_are_those_that_the_tokens_visit() -> None:
    facts = experts(4096, 2048, 1536, 128)
    layer = msgspec.structs.replace(facts.network.linears[0], flops_per_token=8 * 6.0 * 2048 * 1536)
    uncounted = msgspec.structs.replace(
        facts, workload=msgspec.structs.replace(facts.workload, rows=NOT_RECORDED)
    )
    assert routed_rows(layer, facts) == 4096
    assert routed_rows(layer, uncounted) == 8 * 4096
    assert routed_rows(facts.network.linears[0], uncounted) is None
