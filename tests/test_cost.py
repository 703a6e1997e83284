"""The cost model against arithmetic done by hand and rows measured on a GPU."""

import itertools
from contextlib import nullcontext

import pytest
from msgspec.structs import replace
from torch import nn

from fp8doctor.analysis.modelled_fix import modelled_steps
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.treatment_table import COMPILE_MODEL
from fp8doctor.answer.job import product
from fp8doctor.cost.layer import Call, layer_ms
from fp8doctor.cost.matmuls import NoNumbers, amdahl, matmuls_ms
from fp8doctor.cost.step_cost import (
    in_bf16,
    modelled_step,
    priced_step,
    unmodelled,
    with_linears_compiled,
    with_recipe,
)
from fp8doctor.errors import UserError
from fp8doctor.facts import NOT_RECORDED, Blocks, Facts, Gpu, Workload
from fp8doctor.finding import Treatment
from fp8doctor.gpus import GPUS, gpu_spec, modelled_gpu
from fp8doctor.kit import example, float8
from fp8doctor.recipes import RECIPES
from fp8doctor.report import load_report
from research.benchmarks import cost_model, measured_steps, recorded_steps
from tests.examine.models import network

DECODER_468M = [(1024, 1024, 96), (1024, 4096, 48), (4096, 1024, 24)]
DECODER_8B_WIDE = [(4096, 4096, 16), (4096, 14336, 8), (14336, 4096, 4)]
"""(K, N, layers) of the two decoders that were measured on one H200, torch 2.11, torchao 0.18, November
2026."""

TENSORWISE = (None, RECIPES["torchao", "tensorwise"])
"""In BF16, and in FP8."""


def test_amdahl() -> None:
    for share, speedup, whole in ((0.6, 1.5, 1.25), (0.8, 1.5, 1.364), (0.0, 9.0, 1.0), (0.5, 0.5, 0.667)):
        assert amdahl(share, speedup) == pytest.approx(whole, abs=0.001)


@pytest.mark.parametrize(
    ("layers", "tokens", "fp8", "measured_ms"),
    [
        (DECODER_468M, 16384, False, 58.2),
        (DECODER_468M, 16384, True, 32.1),
        (DECODER_8B_WIDE, 8192, False, 66.8),
        (DECODER_8B_WIDE, 8192, True, 38.7),
        ([(4096, 32000, 1)], 8192, False, 9.78),
        ([(4096, 16384, 1)], 16384, True, 5.12),
        ([(4096, 4096, 1)], 8192, False, 1.070),
        ([(1024, 50257, 1)], 16384, False, 44.0),
        ([(1024, 50304, 1)], 16384, False, 6.9),
    ],
)
def test_gemms_take_about_the_kernel_time_that_was_measured(
    layers: list[tuple[int, int, int]], tokens: int, fp8: bool, measured_ms: float
) -> None:
    times = [(count, matmuls_ms(tokens, k, n, gpu_spec("H200"), TENSORWISE[fp8])) for k, n, count in layers]
    assert sum(count * sum(each) for count, each in times if each) == pytest.approx(measured_ms, rel=0.15)


def test_block_scaling_and_four_bits_have_matmuls_of_their_own() -> None:
    """As Transformer Engine's table of a B300 has them; Hopper has no FP4."""
    b300, shape = gpu_spec("B300"), (15872, 4096, 16384)
    te = {name: RECIPES["transformer_engine", name] for name in ("current", "mxfp8", "nvfp4")}
    current, mx, nv = (sum(matmuls_ms(*shape, b300, each)) for each in te.values())
    assert mx / current == pytest.approx(171.9 / 163.5, rel=0.01)
    assert nv / current == pytest.approx(90.3 / 163.5, rel=0.01)
    with pytest.raises(NoNumbers):
        matmuls_ms(*shape, gpu_spec("H200"), te["nvfp4"])


def test_with_few_rows_a_matmul_takes_as_long_as_its_weights_are_read() -> None:
    bf16, fp8 = (sum(matmuls_ms(16, 16384, 16384, gpu_spec("H200"), each)) for each in TENSORWISE)
    assert fp8 < 0.8 * bf16


def test_a_transformer_without_known_attention_has_no_time() -> None:
    """Mamba's ``in_proj`` makes no keys and values."""
    for projection, known in (("q_lin", True), ("in_proj", False)):
        of = {"blocks": (Blocks(name="layers", count=1),), "kind": "transformers.models.some.Model"}
        linears = (float8(f"layers.0.{projection}", in_features=2048, out_features=4096),)
        whole = replace(example(linears=linears).network, **of)
        facts = replace(example(tokens=4096), network=whole)
        assert (modelled_step(facts) is not None) is known


def test_an_embedding_is_no_work() -> None:
    parts = nn.Embedding(320, 32), nn.LSTM(32, 32, 2), nn.Linear(32, 320)
    assert unmodelled(network(nn.Sequential(*parts)))


def modelled(facts: Facts) -> str | None:
    gpu = modelled_gpu(facts)
    return gpu and gpu.name


def test_the_modelled_gpu_is_the_assumed_then_the_visible_then_h100() -> None:
    a100, h200 = Gpu(name="NVIDIA A100-SXM4-80GB", visible=False), Gpu(name="NVIDIA H200", visible=True)
    assert modelled(Facts()) == "H100"
    assert modelled(Facts(gpus=())) == "H100"
    assert modelled(Facts(gpus=(a100,))) == "H100"
    assert modelled(Facts(gpus=(a100, h200))) == "H200"
    assert modelled(Facts(gpus=(h200,), assumed_gpu="l40s")) == "L40S"


PRODUCTS = [
    ("NVIDIA A100-SXM4-80GB", "A100"),
    ("NVIDIA A100-SXM4-40GB", "A10040GB"),
    ("NVIDIA L4", "L4"),
    ("NVIDIA L40", "L40"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100", "H100"),
    ("NVIDIA H100 PCIe", "H100PCIE"),
    ("NVIDIA H100 NVL", "H100NVL"),
    ("NVIDIA H200", "H200"),
    ("NVIDIA H200 NVL", "H200NVL"),
    ("NVIDIA H20", "H20"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA GB200", "GB200"),
    ("NVIDIA B300 SXM6 AC", "B300"),
    ("NVIDIA GB300", "GB300"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX6000ADA"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000"),
    ("NVIDIA GeForce RTX 5090", "RTX5090"),
]

WITHOUT_A_DATASHEET = [
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5080",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA L40G",
    "NVIDIA H800",
    "NVIDIA GH200 480GB",
    "NVIDIA H20-3e",
    "NVIDIA GB300-WS",
    "AMD Instinct MI300X",
    "a user's own words",
]


@pytest.mark.parametrize("product", WITHOUT_A_DATASHEET)
def test_a_gpu_without_a_datasheet_is_none_of_those_that_have_one(product: str) -> None:
    facts = measured_steps.facts_of(measured_steps.steps()[0])
    facts = replace(facts, gpus=(Gpu(name=product, visible=True),), assumed_gpu=None)
    assert modelled_gpu(facts) is None
    assert modelled_step(facts) is None
    if "NVIDIA" in product:
        with pytest.raises(UserError, match="no datasheet for the GPU"):
            gpu_spec(product)


BOUNDED = [row for row in measured_steps.rows() if row.table in cost_model.BOUNDED]


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: f"{row.job}: {row.arm}")
def test_a_measured_step_is_modelled_within_its_bound(row: measured_steps.Row) -> None:
    assert abs(row.time_error) <= cost_model.BOUND
    assert abs(row.error) <= cost_model.BOUND
    assert row.is_baseline or row.is_even or row.right_sign


SAVED = [
    (eager, after)
    for eager in measured_steps.steps()
    for after in measured_steps.steps()
    if eager["arm"] == "FP8 tensorwise eager"
    and after == eager | {"arm": "FP8 tensorwise compiled", "compiled": True, "ms": after["ms"]}
]


@pytest.mark.parametrize(
    ("eager", "after"),
    [pair for pair in SAVED if "lora_rank" not in pair[0]],
    ids=lambda step: f"{step['model']} {step['layers']}",
)
def test_the_saving_of_compiling_a_whole_model_covers_what_was_measured(
    eager: dict[str, object], after: dict[str, object]
) -> None:
    facts = replace(measured_steps.facts_of(eager), assumed_gpu="H200")
    steps = modelled_steps(facts, Treatment(name=COMPILE_MODEL, summary="", code=""))
    assert steps
    assert steps.saving.low < eager["ms"] - after["ms"] < steps.saving.high  # type: ignore[operator]


def job(**changes: object) -> Facts:
    """A block of attention and MLP, and a head."""
    linears = [
        float8(f"blocks.0.{name}", in_features=4096, out_features=n, **changes)
        for name, n in (("q", 4096), ("up", 14336))
    ]
    plain = {"role": "head", "use": "none", "stack": "torch", "recipe": None}
    return example(
        linears=(*linears, float8("head", in_features=4096, out_features=32000, **changes | plain)),
        trainable_parameters=206_569_472,
        vocabulary=32000,
        blocks=(Blocks(kind="own.Block"),),
        tokens=8192,
        sequence_length=2048,
        accumulate=1,
        assumed_gpu="H200",
    )


def step_ms(facts: Facts) -> float:
    step = modelled_step(facts)
    assert step
    return step.step_ms


def test_the_parts_of_a_step_add_up() -> None:
    step = modelled_step(job())
    assert step
    assert min(time for family, time in step.families_ms.items() if family != "gemm_fp32") > 0
    assert sum(step.families_ms.values()) == pytest.approx(step.busy_ms)
    assert step.busy_ms < step.step_ms
    assert step.gpu == "H200"


def test_with_few_tokens_the_step_is_the_hosts() -> None:
    network = job().network
    narrow = tuple(replace(linear, in_features=1024, out_features=1024) for linear in network.linears)
    few = replace(
        job(),
        workload=Workload(tokens=64, sequence_length=64, accumulate=1),
        network=replace(network, linears=narrow, trainable_parameters=3 << 20),
    )
    step = modelled_step(few)
    assert step
    assert step.step_ms == step.host_ms > step.busy_ms


def test_what_a_treatment_changes_changes_the_step() -> None:
    as_is = job()
    assert step_ms(with_linears_compiled(as_is, yes=True)) < step_ms(in_bf16(as_is)) < step_ms(as_is)
    assert step_ms(with_recipe(with_linears_compiled(as_is, yes=True), "rowwise")) > step_ms(
        with_linears_compiled(as_is, yes=True)
    )
    assert step_ms(job(checkpointed="blocks.0")) > step_ms(as_is)
    once, again = (modelled_step(each) for each in (as_is, job(checkpointed="blocks.0")))
    assert once
    assert again
    assert again.families_ms["gemm_fp8"] > 1.2 * once.families_ms["gemm_fp8"]
    once, twice = (replace(as_is, workload=replace(as_is.workload, accumulate=count)) for count in (1, 2))
    optimizer = modelled_step(once).families_ms["optimizer"]  # type: ignore[union-attr]
    assert step_ms(twice) == pytest.approx(2 * step_ms(once) - optimizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "experts"},
        {"features": {"emulate": True}},
        {"features": {"own_forward": True}},
        {"recipe": "mxfp8"},
        {"stack": "unsloth"},
        {"use": "storage"},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_no_step_is_claimed_where_there_are_no_numbers(changes: dict[str, object]) -> None:
    assert modelled_step(job(**changes)) is None


def test_no_step_is_claimed_without_facts_or_fp8_tensor_cores() -> None:
    assert modelled_step(Facts(workload=Workload(tokens=64))) is None
    assert modelled_step(replace(job(), assumed_gpu="A100")) is None
    assert modelled_step(replace(in_bf16(job()), assumed_gpu="A100"))


@pytest.mark.parametrize(("parameters", "claimed"), [(30_000_000, True), (1_000_000, False)])
def test_no_step_is_claimed_of_a_model_of_convolutions(parameters: int, claimed: bool) -> None:
    """Three Linears in a model of 100 million parameters, 16 million of them an embedding's."""
    facts = job(parameters=parameters)
    network = replace(facts.network, parameters=100_000_000, vocabulary=32_000, hidden_size=500)
    assert (modelled_step(replace(facts, network=network)) is not None) is claimed


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *PRODUCTS,
        *((product(spec.name), spec.name) for spec in GPUS),
        ("4090", "RTX4090"),
        ("rtx-5090", "RTX5090"),
        ("GeForce RTX 4090", "RTX4090"),
        ("H100 SXM5", "H100"),
        ("H100 SXM5 80GB", "H100"),
        ("h100-80gb", "H100"),
        ("A100 40GB", "A10040GB"),
        ("NVIDIA H200, 9.0", "H200"),
    ],
)
def test_a_gpu_is_assumed_by_every_name_that_it_is_printed_with(written: str, name: str) -> None:
    for each in (written, written.lower(), written.upper()):
        assert gpu_spec(each).name == name
    if written.startswith("NVIDIA ") and "," not in written:
        assert modelled(Facts(gpus=(Gpu(name=written, visible=True),))) == name


@pytest.mark.parametrize(
    ("written", "meant"), [("gb201", "GB200"), ("RTX 4080", "RTX4090"), ("H200 SXN", "H200"), ("l40x", "L40")]
)
def test_an_unknown_gpu_is_answered_with_near_ones(written: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"did you mean [^?]*\b{meant}\b[^?]*\? known are A100, "):
        gpu_spec(written)


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
        *itertools.product(("H100", "H200", "B200"), ("torch", "transformer_engine"), (None,)),
        *itertools.product(("H100", "H200", "B200"), ("transformer_engine",), ("current",)),
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
