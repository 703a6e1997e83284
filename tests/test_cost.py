"""The cost model against arithmetic done by hand and rows measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import OFF
from fp8doctor.answer.job import product
from fp8doctor.cost import (
    GPUS,
    amdahl,
    eager_balance,
    gpu_spec,
    modelled_gpu,
    step_gemms_ms,
)
from fp8doctor.cost.step_cost import (
    in_bf16,
    modelled_step,
    with_linears_compiled,
    with_recipe,
)
from fp8doctor.errors import UserError
from fp8doctor.facts import Blocks, Facts, Gpu, Linear, Network, Workload
from fp8doctor.recipes import RECIPES
from research.benchmarks import calibrate_cost, cost_model, measured_steps, recorded_steps
from tests.recordings import text_of

COST_TABLES = Path(cost_model.__file__).parent / "results" / "cost_model_h200.md"
TRIAL_PAGE = Path(__file__).parents[1] / "docs" / "trial.md"

SWEPT = measured_steps.swept()

DECODER_468M = [(1024, 1024, 96), (1024, 4096, 48), (4096, 1024, 24)]
DECODER_8B_WIDE = [(4096, 4096, 16), (4096, 14336, 8), (14336, 4096, 4)]
"""(K, N, layers) of the two decoders that were measured on one H200, torch 2.11, torchao 0.18, November
2026."""


@pytest.mark.parametrize(
    ("share", "speedup", "whole"),
    [(0.6, 1.5, 1.25), (0.8, 1.5, 1.364), (0.0, 9.0, 1.0), (1.0, 2.0, 2.0), (0.5, 0.5, 0.667)],
)
def test_amdahl(share: float, speedup: float, whole: float) -> None:
    assert amdahl(share, speedup) == pytest.approx(whole, abs=0.001)


@pytest.mark.parametrize(("share", "speedup"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.0), (0.5, -1.0)])
def test_amdahl_refuses_what_is_not_a_share_or_a_speedup(share: float, speedup: float) -> None:
    with pytest.raises(ValueError, match="share of 0 to 1"):
        amdahl(share, speedup)


@pytest.mark.parametrize(
    ("what", "layers", "tokens", "fp8", "measured_ms"),
    [
        ("the body of a decoder of width 1024", DECODER_468M, 16384, False, 58.2),
        ("the same", DECODER_468M, 16384, True, 32.1),
        ("the body of a decoder of width 4096", DECODER_8B_WIDE, 8192, False, 66.8),
        ("the same", DECODER_8B_WIDE, 8192, True, 38.7),
        ("its head", [(4096, 32000, 1)], 8192, False, 9.78),
        ("the head of the narrow one", [(1024, 32000, 1)], 16384, False, 4.17),
        ("one large Linear, back to back", [(4096, 16384, 1)], 16384, False, 9.774),
        ("the same in Transformer Engine, its casts taken off", [(4096, 16384, 1)], 16384, True, 5.12),
        ("a medium one", [(4096, 4096, 1)], 8192, False, 1.070),
    ],
)
def test_gemms_take_about_the_kernel_time_that_was_measured(
    what: str, layers: list[tuple[int, int, int]], tokens: int, fp8: bool, measured_ms: float
) -> None:
    modelled = sum(
        count * (step_gemms_ms(tokens, k, n, gpu_spec("H200"), fp8=fp8) or 0.0) for k, n, count in layers
    )
    assert modelled == pytest.approx(measured_ms, rel=0.15), what


@pytest.mark.slow
def test_swept_gemms_are_modelled_nearer_than_by_torchao() -> None:
    for what, _, ours, theirs in measured_steps.gemm_errors(SWEPT, gpu_spec("H200")):
        assert ours < 0.7 * theirs, what
        assert ours < (0.10 if "larger" in what or what == "all" else 0.40), what


def test_matmuls_of_an_h100_are_those_of_the_h200() -> None:
    """Five widths, 512 to 16,384 rows: BF16 and FP8 matmuls are some percent longer than on the H200.
    Casts of Transformer Engine with them."""
    grid = json.loads(text_of(Path(cost_model.__file__).parent / "measured" / "h100_grid.json.gz"))
    lines = {(each[0], each[1]): each for each in calibrate_cost.of_grid(grid, gpu_spec("H100"))}
    assert len(lines) == 9
    for module, recipe in lines:
        matmuls, speedup = (float(lines[module, recipe][column].split()[0]) for column in (6, 7))
        assert matmuls == pytest.approx(1, abs=0.08), (module, recipe)
        assert speedup == pytest.approx(1, abs=0.06), (module, recipe)
    for recipe in ("delayed", "current", "blockwise"):
        assert float(lines["te linear", recipe][5].split()[0]) == pytest.approx(1, abs=0.05), recipe


def test_block_scaling_and_four_bits_have_matmuls_of_their_own() -> None:
    """As Transformer Engine's table of a B300 has them; Hopper has no FP4."""
    b300, shape = gpu_spec("B300"), (15872, 4096, 16384)
    te = {name: RECIPES["transformer_engine", name] for name in ("current", "mxfp8", "nvfp4")}
    current, mx, nv = (step_gemms_ms(*shape, b300, fp8=True, recipe=each) or 0.0 for each in te.values())
    assert mx / current == pytest.approx(171.9 / 163.5, rel=0.01)
    assert nv / current == pytest.approx(90.3 / 163.5, rel=0.01)
    assert step_gemms_ms(*shape, gpu_spec("H200"), fp8=True, recipe=te["nvfp4"]) is None


@pytest.mark.parametrize(
    ("layers", "tokens", "eager_ms", "compiled_ms"),
    [(DECODER_468M, 16384, 366.13, 88.31), (DECODER_8B_WIDE, 8192, 179.29, 71.55)],
)
def test_the_saving_of_compiling_covers_what_was_measured(
    layers: list[tuple[int, int, int]], tokens: int, eager_ms: float, compiled_ms: float
) -> None:
    linears = [
        Linear(
            stack="torchao",
            role="body",
            dtype="bfloat16",
            requires_grad=True,
            in_features=k,
            out_features=n,
            gemms=count,
        )
        for k, n, count in layers
    ]
    balance = eager_balance(Facts(workload=Workload(tokens=tokens), assumed_gpu="h200"), linears)
    assert balance is not None
    saving = balance.saving
    assert saving.low < eager_ms - compiled_ms < saving.high
    assert (saving.basis, saving.gpu) == ("modelled", "H200")


@pytest.mark.parametrize("name", ["a100", "L40S", "rtx4090", "RTX 4090", "h100", "H200", "b200", "Rtx5090"])
def test_every_gpu_of_the_contract_is_known_in_any_case(name: str) -> None:
    spec = gpu_spec(name)
    assert spec.source
    assert spec.name == name.upper().replace(" ", "")


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


@pytest.mark.parametrize(("product", "name"), PRODUCTS)
def test_a_product_has_the_datasheet_of_its_own_board(product: str, name: str) -> None:
    assert modelled(Facts(gpus=(Gpu(name=product, visible=True),))) == name


WITHOUT_A_DATASHEET = [
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5080",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H100 PCIe MIG 1g.10gb",
    "NVIDIA L40G",
    "NVIDIA H800",
    "NVIDIA GH200 480GB",
    "NVIDIA GB10",
    "NVIDIA RTX A6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA H20-3e",
    "NVIDIA GB300-WS",
    "AMD Instinct MI300X",
    "a user's own words",
]


@pytest.mark.parametrize("product", WITHOUT_A_DATASHEET)
def test_a_gpu_without_a_datasheet_is_none_of_those_that_have_one(product: str) -> None:
    facts = replace(
        measured_steps.facts_of(measured_steps.steps()[0]),
        gpus=(Gpu(name=product, visible=True),),
        assumed_gpu=None,
    )
    assert modelled_gpu(facts) is None
    assert modelled_step(facts) is None
    assert eager_balance(facts, facts.network.linears) is None


STEPS = measured_steps.rows()
BOUNDED = [row for row in STEPS if row.table in cost_model.BOUNDED]
COMPARED = [row for row in BOUNDED if not row.is_baseline]


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: f"{row.job}: {row.arm}")
def test_a_measured_step_is_modelled_within_its_bound(row: measured_steps.Row) -> None:
    assert abs(row.time_error) <= cost_model.BOUND
    assert abs(row.error) <= cost_model.BOUND


@pytest.mark.parametrize(
    "row", [row for row in COMPARED if not row.is_even], ids=lambda row: f"{row.job}: {row.arm}"
)
def test_what_was_faster_than_compiled_bf16_is_modelled_as_faster(row: measured_steps.Row) -> None:
    assert row.right_sign


@pytest.mark.parametrize(
    "rows",
    [COMPARED, [row for row in COMPARED if row.torchao_says_something]],
    ids=["every arm", "compiled torchao arms"],
)
def test_the_model_is_nearer_than_torchaos_own_roofline(rows: list[measured_steps.Row]) -> None:
    assert len(rows) in (13, 6)
    assert mean(abs(row.error) for row in rows) < mean(abs(row.torchao_error) for row in rows)
    assert sum(abs(row.error) < abs(row.torchao_error) for row in rows) >= len(rows) - 1


@pytest.fixture(scope="module")
def told() -> list[recorded_steps.Told]:
    """What every patient and job whose trial relies on its times is told without it, and the speedup in
    it."""
    return [row for row in recorded_steps.told() if row.is_held]


@pytest.mark.slow
def test_without_a_gpu_a_recorded_model_is_told_about_what_its_trial_measured(
    told: list[recorded_steps.Told],
) -> None:
    assert [(row.patient, row.error) for row in told if row.is_missed] == []
    assert [row.patient for row in told if row.sign == "untold"] == []


@pytest.mark.slow
def test_a_step_whose_host_and_gpu_take_about_as_long_says_that_it_may_be_further_off(
    told: list[recorded_steps.Told],
) -> None:
    assert {row.patient for row in told if row.may_be_off > OFF} == {
        "job qwen2_3b_lora_checkpointing",
        "llama_8b_lora_r32",
        "llama_8b_lora_r8",
        "vit_large",
    }


@pytest.mark.slow
def test_what_is_told_of_the_patients_held_out_is_near_in_the_mean(told: list[recorded_steps.Told]) -> None:
    held_out = [row for row in told if row.use == "held out"]
    errors = [abs(row.error) for row in held_out]
    assert (len(errors), round(median(errors), 3), round(max(errors), 2)) == (42, 0.029, 0.32)
    for page in (COST_TABLES, TRIAL_PAGE):
        said = [line for line in page.read_text("utf-8").splitlines() if "42" in line and "median" in line]
        for number in (f"{median(errors):.1%}", f"{mean(errors):.1%}", f"{max(errors):.0%}"):
            assert any(number.replace("%", " %") in line for line in said), page


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
    balance = eager_balance(facts, [each for each in facts.network.linears if each.use == "training"])
    assert balance
    assert balance.saving.low < eager["ms"] - after["ms"] < balance.saving.high  # type: ignore[operator]


def job(**changes: object) -> Facts:
    """A block of attention and MLP, and a head."""
    common = {
        "gemms": 1,
        "role": "body",
        "features": {},
        "compiled": None,
        "checkpointed": None,
        "requires_grad": True,
        "dtype": "bfloat16",
        "adapter": None,
    }
    common |= {"use": "training", "stack": "torchao", "recipe": "tensorwise"} | changes
    linears = tuple(
        Linear(name=f"blocks.0.{name}", in_features=k, out_features=n, **common)
        for name, k, n in (("q", 4096, 4096), ("up", 4096, 14336))
    )
    head = Linear(
        name="head",
        in_features=4096,
        out_features=32000,
        **common | {"role": "head", "use": "none", "stack": "torch", "recipe": None},
    )
    network = Network(
        linears=(*linears, head),
        trainable_parameters=206_569_472,
        vocabulary=32000,
        blocks=(Blocks(kind="own.Block"),),
    )
    return Facts(
        network=network,
        workload=Workload(tokens=8192, sequence_length=2048, accumulate=1),
        assumed_gpu="H200",
    )


def step_ms(facts: Facts) -> float:
    step = modelled_step(facts)
    assert step
    return step.step_ms


def test_the_parts_of_a_step_add_up() -> None:
    step = modelled_step(job())
    assert step
    assert set(step.families_ms) == {
        "gemm_fp8",
        "gemm_16bit",
        "gemm_fp32",
        "cast",
        "attention",
        "pointwise",
        "loss",
        "optimizer",
    }
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
    assert modelled_step(Facts()) is None
    assert modelled_step(Facts(workload=Workload(tokens=64))) is None
    assert modelled_step(job(), gpu_spec("A100")) is None
    assert modelled_step(in_bf16(job()), gpu_spec("A100"))


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


@pytest.mark.slow
def test_the_gpus_of_all_recordings_can_be_assumed() -> None:
    recorded = sorted(Path(__file__).parent.glob("**/recorded/*.json.gz"))
    gpus = {gpu["name"] for file in recorded for gpu in json.loads(text_of(file))["facts"]["gpus"]}
    assert gpus >= {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    assert {gpu_spec(gpu).name for gpu in gpus} == {"H200", "H100"}


@pytest.mark.parametrize("written", [each for each in WITHOUT_A_DATASHEET if "NVIDIA" in each])
def test_a_gpu_without_a_datasheet_is_not_assumed_as_another(written: str) -> None:
    with pytest.raises(UserError, match="no datasheet for the GPU"):
        gpu_spec(written)


@pytest.mark.parametrize(
    ("written", "meant"), [("gb201", "GB200"), ("RTX 4080", "RTX4090"), ("H200 SXN", "H200"), ("l40x", "L40")]
)
def test_an_unknown_gpu_is_answered_with_near_ones(written: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"did you mean [^?]*\b{meant}\b[^?]*\? known are A100, "):
        gpu_spec(written)
