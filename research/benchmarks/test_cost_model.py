"""The cost model beside every measured matmul and step, and without a trial."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import OFF
from fp8doctor.cost.layer import layer_casts_ms
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled, with_recipe
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.gpus import gpu_spec
from fp8doctor.recipes import RECIPES
from research.benchmarks import calibrate_cost, cost_model, measured_steps, recorded_steps
from tests.recordings import text_of

COST_TABLES = Path(cost_model.__file__).parent / "results" / "cost_model_h200.md"
LLAMA_8B = Path(__file__).parents[2] / "tests" / "patients" / "recorded" / "h200-llama_8b_float8.json.gz"
TRIAL_PAGE = Path(__file__).parents[2] / "docs" / "trial.md"

SWEPT = measured_steps.swept()
COMPARED = [row for row in measured_steps.rows() if row.table in cost_model.BOUNDED and not row.is_baseline]


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
    """Those whose host and GPU take about as long say that they may be further off."""
    assert [(row.patient, row.error) for row in told if row.is_missed] == []
    assert [row.patient for row in told if row.sign == "untold"] == []
    assert {row.patient for row in told if row.may_be_off > OFF + 1e-9} == {
        "job qwen2_3b_lora_checkpointing",
        "job te_mmdit_current",
        "llama_8b_lora_r32",
        "llama_8b_lora_r8",
        "vit_large",
    }


@pytest.mark.slow
def test_what_is_told_of_the_patients_held_out_is_near_in_the_mean(told: list[recorded_steps.Told]) -> None:
    held_out = [row for row in told if row.use == "held out"]
    errors = [abs(row.error) for row in held_out]
    assert (len(errors), round(median(errors), 3), round(max(errors), 2)) == (44, 0.029, 0.32)
    for page in (COST_TABLES, TRIAL_PAGE):
        said = [line for line in page.read_text("utf-8").splitlines() if "44" in line and "median" in line]
        for number in (f"{median(errors):.1%}", f"{mean(errors):.1%}", f"{max(errors):.0%}"):
            assert any(number.replace("%", " %") in line for line in said), page


@pytest.mark.parametrize(
    ("width", "tokens", "blocks", "eager_ms", "compiled_ms"),
    [(1024, 16384, 6, 49.1, 4.26), (4096, 8192, 2, 40.8, 4.31), (4096, 2048, 2, 18.2, 1.97)],
)
def test_the_casts_of_nanochat_are_those_that_were_measured(
    width: int, tokens: int, blocks: int, eager_ms: float, compiled_ms: float
) -> None:
    """Kernel time of a decoder's blocks less that of its BF16 twin, GEMMs and attention aside, on an H100."""
    recipe, gpu = RECIPES["nanochat", "tensorwise"], gpu_spec("H100")
    shapes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    for compiled, measured in ((False, eager_ms), (True, compiled_ms)):
        modelled = blocks * sum(
            layer_casts_ms(recipe, tokens, k, n, gpu, compiled=compiled) for k, n in shapes
        )
        assert modelled == pytest.approx(measured, rel=0.1)


def test_a_step_in_mxfp8_is_modelled_where_it_runs() -> None:
    """torchao 0.13: 10,417 tokens a second with tensorwise, 9,642 with MXFP8, on eight B200."""
    of = read_saved(LLAMA_8B)[0]
    of = replace(
        of,
        workload=replace(of.workload, tokens=8192, sequence_length=8192, rows={}),
        trial=replace(of.trial, rows={}),
        assumed_gpu="B200",
    )
    compiled = with_linears_compiled(of, yes=True)
    mxfp8 = with_recipe(compiled, "mxfp8")
    steps = map(modelled_step, (in_bf16(compiled), compiled, mxfp8))
    plain_ms, tensorwise_ms, mxfp8_ms = (step.step_ms for step in steps if step)
    assert mxfp8_ms / tensorwise_ms == pytest.approx(10417 / 9642, rel=0.01)
    assert tensorwise_ms < mxfp8_ms < plain_ms
    assert modelled_step(replace(mxfp8, assumed_gpu="H100")) is None
    assert modelled_step(with_linears_compiled(mxfp8, yes=False)) is None
