"""Times of routed experts: measured, published, and of models without a GPU."""

from contextlib import nullcontext
from itertools import product

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.cost.layer import Call, layer_ms
from fp8doctor.cost.matmuls import NoNumbers
from fp8doctor.cost.step_cost import in_bf16, modelled_step, priced_step, with_linears_compiled
from fp8doctor.facts import NOT_RECORDED, Facts
from fp8doctor.gpus import gpu_spec
from fp8doctor.kit import example, float8
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


def te_experts(gpu: str, recipe: str, experts: int, rows: int) -> Facts:
    """One te.GroupedLinear, of whose experts a token visits eight."""
    kind = "transformer_engine.pytorch.module.grouped_linear.GroupedLinear"
    own = {"kind": kind, "stack": "transformer_engine", "recipe": recipe, "use": "training", "compiled": None}
    size = EXPERTS.in_features * EXPERTS.out_features
    own |= {"gemms": experts, "parameters": experts * size, "flops_per_token": 6.0 * 8 * size}
    sizes = dict.fromkeys(("parameters", "trainable_parameters"), experts * size)
    facts = example(linears=(replace(EXPERTS, **own),), tokens=rows // 8, assumed_gpu=gpu, **sizes)
    return replace(facts, trial=NOT_RECORDED)


@pytest.mark.parametrize(
    ("experts", "rows", "measured"), [(64, 49_152, 11.3 / 6.1), (128, 65_536, 28.4 / 12.9)]
)
def test_the_host_launches_each_expert_of_a_te_grouped_linear(
    experts: int, rows: int, measured: float
) -> None:
    """BF16 too: no graph holds these. The wall times of results/grouped_h200.md, delayed scaling."""
    fp8 = te_experts("H200", "delayed", experts, rows)
    bf16 = with_linears_compiled(in_bf16(fp8), yes=True)
    slower = priced_step(fp8).step_ms / priced_step(bf16).step_ms
    assert slower == pytest.approx(measured, rel=0.1)


def test_a_host_that_nobody_timed_sets_no_pace() -> None:
    """The same step has a time where the GPU's work is the longer."""
    with pytest.raises(NoNumbers, match="host"):
        priced_step(te_experts("B200", "mxfp8", 128, 32_768))
    assert priced_step(te_experts("B200", "mxfp8", 8, 524_288)).step_ms > 0
    assert priced_step(te_experts("H200", "current", 128, 32_768)).step_ms > 0


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
