"""The estimated peak beside peaks that trials measured on an H200."""

from collections.abc import Iterator
from typing import Any

import pytest

import fp8doctor
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.facts import Arm, Facts
from fp8doctor.gpus import gpu_spec
from fp8doctor.planning.form import Form
from fp8doctor.planning.job_options import Options, share_of
from fp8doctor.recipes import RECIPES, TORCHAO
from research.benchmarks.recorded_steps import JOBS, PATIENTS, reports
from tests.configurations import LLAMA_8B

ARMS = {
    "bf16_compiled": None,
    "recipe-rowwise": ("torchao", "rowwise"),
    "recipe-rowwise-with-gw-hp": ("torchao", "rowwise_with_gw_hp"),
}

OFF = 0.05
"""Largest error of the recorded decoders of transformers; with Accelerate, which copies the logits once more.
Gemma 2 and one Llama compute attention in the open, which a plan does not."""


def decoders() -> Iterator[tuple[str, Facts, Arm]]:
    """Timed causal language models of transformers, in BF16, with what their arms held at the peak."""
    for name, facts, arms in reports((PATIENTS, JOBS)):
        plain = facts.network.kind.endswith("ForCausalLM") and "eager_attention" not in name
        if plain and facts.network.dtypes.keys() == {"bfloat16"} and facts.network.parameters > 1e9:
            yield from ((name, facts, arms[arm]) for arm in ARMS if arm in arms and arms[arm].peak_gib)


@pytest.mark.parametrize(
    ("facts", "arm"), [pytest.param(facts, arm, id=f"{name} {arm.name}") for name, facts, arm in decoders()]
)
def test_the_peak_of_a_compiled_decoder(facts: Facts, arm: Arm) -> None:
    batch, seq = facts.workload.batch_size or 1, facts.workload.sequence_length or 0
    recomputed = any(each.get("checkpointed") is not None for each in facts.network.linears)
    options = Options(batch=batch, seq=seq, checkpointing="full" if recomputed else "none")
    recipe = RECIPES[found] if (found := ARMS[arm.name]) else None
    share, stack = share_of(in_bf16(facts), options), recipe.stack if recipe else TORCHAO.name
    peak = Form(share, options, gpu_spec("H200"), stack, recipe).peak()
    assert peak.gib == pytest.approx(arm.peak_gib, rel=OFF)


def peak(stack: str, recipe: str, **given: Any) -> float:
    """Peak of a Llama 3 8B on an H100."""
    return min(each.memory_gib for each in planned(stack, recipe, **given) if each.memory_gib)


def planned(stack: str, recipe: str, **given: Any) -> Any:
    return fp8doctor.plan(LLAMA_8B, "H100", stack=stack, recipe=recipe, batch=1, **given).rows


def test_a_fused_loss_keeps_no_logits() -> None:
    """14 bytes for each of 8192 x 128,256 logits; without them the peak is in the optimizer."""
    whole, fused = (peak("torchao", "tensorwise", seq=8192, dp=64, fused_loss=each) for each in (False, True))
    assert whole - fused == pytest.approx(14 * 8192 * 128_256 / 2**30, rel=0.01)


def test_a_recomputed_block_casts_its_weights_again_unless_micro_batches_share_them() -> None:
    """Two copies of 7.0 B weights of 32 blocks."""
    once, kept = (
        peak("te", "delayed", seq=8192, dp=64, checkpointing="full", accumulate=each) for each in (1, 2)
    )
    assert kept - once == pytest.approx(2 * 6.98e9 * 31 / 32 / 2**30, rel=0.02)


def test_transformer_engine_keeps_its_part_of_a_gathered_input() -> None:
    """With 8 ranks, DTensor keeps the inputs of attention and MLP whole: 2 x 4096 features of 32 blocks."""
    te, torch = (
        peak(stack, recipe, seq=65536, tp=8, dp=8, fused_loss=True)
        for stack, recipe in (("te", "delayed"), ("torchao", "rowwise_with_gw_hp"))
    )
    inputs = 2 * 2 * 65536 * 4096 * 32 * 7 / 8 / 2**30
    copies = 2 * 6.98e9 / 8 / 2**30
    assert torch - te + copies == pytest.approx(inputs, rel=0.02)
