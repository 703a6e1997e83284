"""The estimated peak beside peaks that trials measured on an H200."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.facts import Arm, Facts
from fp8doctor.gpus import gpu_spec
from fp8doctor.planning.job_options import Options
from fp8doctor.planning.peaks import peak_of
from fp8doctor.planning.share import share_of
from fp8doctor.recipes import RECIPES
from tests.benchmarks.recorded_steps import JOBS, PATIENTS, reports

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
    peak = peak_of(share_of(in_bf16(facts), options), options, gpu_spec("H200"), recipe, compiled=True)
    assert peak.gib == pytest.approx(arm.peak_gib, rel=OFF)
