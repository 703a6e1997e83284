"""Times of routed experts: measured, published, and of models without a GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.cost import gpu_spec
from fp8doctor.cost.layer import Call, layer_ms
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled
from fp8doctor.facts import Linear
from fp8doctor.report import load_report
from research.benchmarks import grouped, recorded_steps

EXPERTS = Linear(
    name="model.layers.0.mlp.experts.gate_up_proj",
    kind="transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
    stack="torch",
    use="none",
    recipe=None,
    features={},
    in_features=2048,
    out_features=1536,
    gemms=128,
    bias=False,
    dtype="bfloat16",
    requires_grad=True,
    role="experts",
    adapter=None,
    compiled="",
    checkpointed=None,
)

PAGE = Path(grouped.__file__).parent / "results" / "grouped_h200.md"

MEASURED = [each for each in grouped.experts() if each.split == "equal"]


def test_experts_take_about_what_was_measured() -> None:
    assert len(MEASURED) == 36
    assert median(abs(each.error) for each in MEASURED) < 0.08
    for each in MEASURED:
        assert abs(each.error) < (0.14 if each.what.endswith("bf16") else 0.25), each


def test_fp8_is_faster_and_slower_where_it_was() -> None:
    """All but one of 24, which takes 0.98x the speed of BF16."""
    wrong = [
        each
        for each in MEASURED
        for bf16 in [
            next(other for other in MEASURED if (other.shape, other.what) == (each.shape, each.bf16))
        ]
        if (bf16.busy_ms > each.busy_ms) != (bf16.modelled_ms > each.modelled_ms)
    ]
    assert [(each.shape, each.what) for each in wrong] == [
        ("qwen3-30b gate_up, ep 8", "te.GroupedLinear current")
    ]


def test_the_page_of_the_measurement_is_of_this_model(capsys: pytest.CaptureFixture[str]) -> None:
    grouped.main()
    assert PAGE.read_text("utf-8").endswith(capsys.readouterr().out)


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
    assert times is not None
    assert times["gemm_fp8" if recipe else "gemm_16bit"] > 0
    assert (times["cast"] > 0) is (recipe is not None)
    rowwise = replace(EXPERTS, stack="torchao", recipe="rowwise", use="training")
    assert (layer_ms(Call(rowwise, 65_536), gpu_spec(gpu), "compiled") is None) is (gpu == "B200")


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_a_trained_moe_takes_about_what_its_trial_measured(gpu: str) -> None:
    """Of no constant: a Mixtral of 8 layers whose attention is in FP8 and whose experts are not."""
    facts = load_report(recorded_steps.JOBS / f"{gpu.lower()}-moe.json.gz").facts
    ran = {each.name: each.step_ms for each in facts.trial.arms}
    compiled = modelled_step(with_linears_compiled(in_bf16(facts), yes=True))
    says = modelled_speedup(facts)
    assert compiled is not None
    assert says is not None
    assert says.as_is is not None
    assert compiled.step_ms == pytest.approx(ran["bf16_compiled"], rel=0.12)
    assert says.compiled == pytest.approx(ran["bf16_compiled"] / ran["prescribed"], rel=0.02)
    assert says.as_is == pytest.approx(ran["bf16_compiled"] / ran["as_is"], rel=0.13)
