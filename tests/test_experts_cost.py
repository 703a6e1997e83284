"""Times of routed experts: measured, published, and of models without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.cost.layer import Call, NoNumbers, layer_ms
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled
from fp8doctor.facts.examples import float8
from fp8doctor.gpus import gpu_spec
from fp8doctor.report import load_report
from research.benchmarks import recorded_steps

EXPERTS = float8(
    "model.layers.0.mlp.experts.gate_up_proj",
    kind="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
    in_features=2048,
    out_features=1536,
    gemms=128,
    bias=False,
    role="experts",
    compiled="",
)


@pytest.mark.parametrize(
    ("gpu", "stack", "recipe"),
    [
        *product(("H100", "H200", "B200"), ("torch", "transformer_engine"), (None,)),
        *product(("H100", "H200", "B200"), ("transformer_engine",), ("current",)),
        ("B200", "torchao", "mxfp8"),
    ],
)
def test_a_grouped_weight_has_a_time_where_it_runs(gpu: str, stack: str, recipe: str | None) -> None:
    layer = replace(EXPERTS, stack=stack, recipe=recipe, use="training" if recipe else "none")
    times = layer_ms(Call(layer, 65_536), gpu_spec(gpu), "compiled")
    assert times["gemm_fp8" if recipe else "gemm_16bit"] > 0
    assert (times["cast"] > 0) is (recipe is not None)
    rowwise = replace(EXPERTS, stack="torchao", recipe="rowwise", use="training")
    with pytest.raises(NoNumbers) if gpu == "B200" else nullcontext():
        layer_ms(Call(rowwise, 65_536), gpu_spec(gpu), "compiled")


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_a_trained_moe_takes_about_what_its_trial_measured(gpu: str) -> None:
    """Of no constant: a Mixtral of 8 layers whose attention is in FP8 and whose experts are not."""
    facts = load_report(recorded_steps.JOBS / f"{gpu.lower()}-moe.json.gz").facts
    ran = {each.name: each.step_ms for each in facts.trial.arms}
    compiled = modelled_step(with_linears_compiled(in_bf16(facts), yes=True))
    says = modelled_speedup(facts)
    assert compiled is not None
    assert says is not None
    assert says.now is not None
    assert compiled.step_ms == pytest.approx(ran["bf16_compiled"], rel=0.12)
    assert says.best.value == pytest.approx(ran["bf16_compiled"] / ran["prescribed"], rel=0.02)
    assert says.now.value == pytest.approx(ran["bf16_compiled"] / ran["as_is"], rel=0.13)
