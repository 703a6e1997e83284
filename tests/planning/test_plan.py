"""Plans of public architectures, built on the meta device."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

import fp8doctor
from fp8doctor import Plan
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.cost.step_cost import in_fp8, modelled_step, with_linears_compiled
from fp8doctor.planned import facts_of
from fp8doctor.planning.estimates import Row
from fp8doctor.recipes import TRANSFORMER_ENGINE
from tests.configurations import LLAMA_8B


def rows(found: Plan, *, stack: str = "torchao") -> dict[tuple[str, str], Row]:
    """The rows of a stack, by GPU and recipe."""
    return {(each.gpu, each.recipe): each for each in found.rows if each.stack == stack}


@pytest.fixture(scope="module")
def plain() -> Plan:
    return fp8doctor.plan(LLAMA_8B, "H100, B200, h100,", batch=1, seq=4096)


def test_a_row_for_each_recipe_and_gpu(plain: Plan) -> None:
    found = rows(plain)
    tensorwise = found["H100", "tensorwise"]
    assert tensorwise.speedup == pytest.approx(tensorwise.bf16_step_ms / tensorwise.step_ms)
    assert tensorwise.speedup_low < tensorwise.speedup < tensorwise.speedup_high
    assert tensorwise.fits
    assert found["B200", "mxfp8"].step_ms is not None
    assert (found["H100", "mxfp8"].step_ms, found["H100", "mxfp8"].why) == (None, "it does not run there")
    assert plain.parameters == 8_030_261_248
    assert len({(each.gpu, each.stack, each.recipe) for each in plain.rows}) == len(plain.rows)


def test_the_parts_of_a_step_add_up(plain: Plan) -> None:
    for row in plain.rows:
        assert row.basis == "modelled"
        if row.step_ms is not None:
            assert sum(row.parts_ms.values()) == pytest.approx(row.step_ms, abs=0.01)
            assert sum(row.bf16_parts_ms.values()) == pytest.approx(row.bf16_step_ms, abs=0.01)
            assert set(row.limits) <= row.parts_ms.keys()


def test_a_plan_and_a_report_price_a_step_alike(plain: Plan) -> None:
    facts = replace(facts_of(LLAMA_8B, 1, 4096), assumed_gpu="H100")
    body = [each for each in facts.network.linears if each.role == "body"]
    for recipe in ("tensorwise", "rowwise"):
        row = rows(plain)["H100", recipe]
        compiled = with_linears_compiled(in_fp8(facts, body, recipe), yes=True)
        assert row.step_ms == pytest.approx(modelled_step(compiled).step_ms)  # type: ignore[union-attr]
        bf16 = modelled_step(with_linears_compiled(facts, yes=True))
        assert row.bf16_step_ms == pytest.approx(bf16.step_ms)  # type: ignore[union-attr]


@pytest.mark.parametrize("gpu", ["B200", "RTX4090"])
def test_a_report_is_no_surer_of_a_gpu_that_nobody_measured(gpu: str) -> None:
    config = {**LLAMA_8B, "num_hidden_layers": 2}
    row = rows(fp8doctor.plan(config, [gpu], batch=1, seq=4096))[gpu, "tensorwise"]
    found = modelled_speedup(replace(facts_of(config, 1, 4096), assumed_gpu=gpu))
    assert found is not None
    assert row.speedup is not None
    assert found.best.low / found.best.value == pytest.approx(row.speedup_low / row.speedup)
    assert found.best.high / found.best.value == pytest.approx(row.speedup_high / row.speedup)


def test_a_measured_step_rescales_every_time(plain: Plan) -> None:
    base = rows(plain)["H100", "tensorwise"]
    scaled = rows(fp8doctor.plan(LLAMA_8B, ["H100", "B200"], batch=1, seq=4096, step_ms=1000))
    assert scaled["H100", "tensorwise"].bf16_step_ms == pytest.approx(1000)
    assert scaled["H100", "tensorwise"].speedup == pytest.approx(base.speedup)
    assert scaled["B200", "tensorwise"].step_ms == pytest.approx(
        rows(plain)["B200", "tensorwise"].step_ms * 1000 / base.bf16_step_ms
    )


def test_parallelism_divides_memory_and_adds_communication(plain: Plan) -> None:
    alone = rows(plain)["H100", "tensorwise"]
    settings: dict[str, dict[str, int]] = {"dp": {"dp": 8}, "tp": {"tp": 8}, "cp": {"cp": 4}}
    settings["pp"] = {"pp": 4, "accumulate": 8}
    for name, options in settings.items():
        row = rows(fp8doctor.plan(LLAMA_8B, "H100", batch=1, seq=4096, **options))["H100", "tensorwise"]
        assert row.memory_gib < alone.memory_gib, name
        if name != "dp":  # hidden behind computing
            assert row.parts_ms.get("communication" if name != "pp" else "bubble", 0) > 0, name


def test_rows_that_fp8_does_not_take_are_the_reason() -> None:
    odd = [each for each in fp8doctor.plan(LLAMA_8B, "H100", seq=5000).rows if each.recipe == "tensorwise"]
    assert all(each.step_ms is None and "5,000" in each.why for each in odd)


def test_lora_trains_only_its_adapters() -> None:
    lora = rows(fp8doctor.plan(LLAMA_8B, "H100", batch=1, lora=16, lora_modules="q_proj,v_proj"))[
        "H100", "tensorwise"
    ]
    whole = rows(fp8doctor.plan(LLAMA_8B, "H100", batch=1))["H100", "tensorwise"]
    assert lora.memory_gib < whole.memory_gib - 20
    assert lora.parts_ms["optimizer"] < 1
    assert lora.parts_ms["matmuls"] < 0.8 * whole.parts_ms["matmuls"]


def test_checkpointing_costs_time_and_saves_memory() -> None:
    found = [
        rows(fp8doctor.plan(LLAMA_8B, "H200", batch=1, seq=8192, checkpointing=each))["H200", "tensorwise"]
        for each in ("none", "selective", "full")
    ]
    assert found[0].step_ms < found[1].step_ms < found[2].step_ms
    assert found[0].memory_gib > found[1].memory_gib > found[2].memory_gib
    assert found[2].largest_batch > found[0].largest_batch


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    largest = rows(fp8doctor.plan(LLAMA_8B, "H200"))["H200", "tensorwise"].largest_batch
    for batch, fits in ((largest, True), (largest + 1, False)):
        row = rows(fp8doctor.plan(LLAMA_8B, "H200,B300", batch=batch))["H200", "tensorwise"]
        assert row.fits is fits


def test_transformer_engine_converts_experts_and_torchao_leaves_them_in_bf16() -> None:
    found = fp8doctor.plan({"model_type": "mixtral", "num_hidden_layers": 4}, "H200", batch=1, seq=8192)
    dense, whole = rows(found)["H200", "rowwise"], rows(found, stack="te")["H200", "current"]
    assert dense.parts_ms["experts"] > dense.parts_ms["matmuls"]
    assert "experts" not in whole.parts_ms
    assert whole.speedup > dense.speedup


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (LLAMA_8B, {"tp": 3}, "--tp 3 does not divide the 32 heads of attention"),
        (LLAMA_8B, {"batch": 64}, "fits on no GPU: BF16 needs 1,5"),
        (LLAMA_8B, {"recipe": "int4"}, "--recipe int4 is not known; known are all, tensorwise"),
        (LLAMA_8B, {"lora": 8, "lora_modules": ("qkv",)}, "no layer is named qkv; the model has down_proj"),
        (LLAMA_8B, {"gpus": "H100,MI300X"}, "no estimates for AMD GPUs such as MI300X"),
        (LLAMA_8B, {"gpus": "GTX1080"}, "no datasheet for the GPU 'GTX1080'"),
        (LLAMA_8B, {"gpus": []}, "--gpu names no GPU"),
        ({"model_type": "bert"}, {}, "bert is an encoder"),
        ({"model_type": "mamba"}, {}, "fp8doctor knows no attention in 32 of the 32 blocks"),
        ({"model_type": "lama"}, {}, "does not know the architecture lama; did you mean llama?"),
        ({"hidden_size": 64}, {}, "has no model_type"),
        (LLAMA_8B, {"dp": "8"}, "Expected `int`, got `str` - at `$.dp`"),
        (LLAMA_8B | {"num_hidden_layers": 10**6}, {}, "num_hidden_layers is 1,000,000"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(config: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        fp8doctor.plan(config, **{"gpus": "H100", **options})
    assert "\n" not in str(raised.value)


def test_a_recipe_that_converts_no_layer_has_no_times() -> None:
    """2880 features are no multiple of 128."""
    found = fp8doctor.plan({"model_type": "gpt_oss", "num_hidden_layers": 2}, "B200", stack="torchao")
    assert {each.recipe: each.why for each in found.rows if each.why} == dict.fromkeys(
        ("nvfp4", "blockwise"), "it converts no layer of this model"
    )


def test_a_batch_that_nobody_gave_fills_the_gpu_and_is_said() -> None:
    plan = fp8doctor.plan(LLAMA_8B, "H200,H100", dp=8)
    shown = [row for row in plan.rows if row.memory_gib]
    assert plan.options.batch == min(row.largest_batch for row in shown) > 1
    assert all(row.fits for row in shown)
    assert f"--batch {plan.options.batch}" in plan.notes[0]
    assert fp8doctor.plan(LLAMA_8B, "H100", dp=8, batch=1).options.batch == 1


def test_a_range_on_both_sides_of_1_is_open() -> None:
    """Neither "use" nor "stay in BF16" stands over it, and no such recipe gains nothing."""
    said = {}
    for batch, tp in ((1, 8), (12, 8), (4, 1)):
        plan = fp8doctor.plan(LLAMA_8B, "H100", batch=batch, seq=2048, dp=8, tp=tp)
        best = min((row for row in plan.rows if row.fits and row.step_ms), key=lambda row: row.step_ms)
        side = "open" if best.speedup_low <= 1 <= best.speedup_high else "known"
        said.setdefault(side, []).append(" open" in plan.answer)
        gained = [row for row in plan.rows if row.speedup_high and row.speedup_high >= 1.03]
        nothing = plan.answer.partition("gain")[0].rpartition(".")[2] if "nothing" in plan.answer else ""
        assert not [row.recipe for row in gained if row.recipe in nothing.lower().replace(",", " ").split()]
    assert all(said["open"])
    assert not any(said["known"])


def test_what_has_an_estimate_is_not_named_without_one() -> None:
    plan = fp8doctor.plan(LLAMA_8B, "H100,B200", dp=8, tp=8, seq=8192, batch=12, checkpointing="selective")
    for gpu in ("H100", "B200"):
        missing = plan.to_text().partition(f"No estimate for {gpu}: ")[2].partition(".\n")[0]
        names = [row.recipe for row in plan.rows if row.gpu == gpu and row.step_ms and row.stack == "torchao"]
        assert names
        assert not {*re.findall(r"(?<!te )\b\w+", missing)} & {*names}, missing


def test_the_assumed_batch_is_what_bf16_takes() -> None:
    """A recipe with more memory does not make the others leave the GPU idle."""
    found = fp8doctor.plan(LLAMA_8B, "H100", dp=8)
    assert {each.fits for each in found.rows if each.recipe == "tensorwise"} == {True}
    assert found.options.batch == found.rows[0].bf16_largest_batch


@pytest.mark.parametrize("gpu", ["B200", "GB200", "GB300"])
def test_fp4_is_used_only_if_it_is_clearly_faster_than_fp8(gpu: str) -> None:
    """FP4 costs exactness: a range that holds the time of an FP8 recipe does not pay for it."""
    found = fp8doctor.plan(LLAMA_8B, gpu, batch=4)
    gains = [each for each in found.rows if each.fits and each.speedup and each.speedup > 1]
    fp8 = max(each.speedup for each in gains if each.recipe != "nvfp4")
    fp4 = next(each for each in gains if each.recipe == "nvfp4")
    assert fp4.speedup > fp8 > fp4.speedup_low
    assert "nvfp4" not in found.answer.partition(":")[0]
    assert f"{fp4.speedup:.2f}x" in found.answer


def test_every_name_in_a_table_is_explained(plain: Plan) -> None:
    """By the words of its recipe, and of its library."""
    text = " ".join(plain.to_text().split())
    shown = [row for row in plain.rows if not row.why]
    assert {row.stack for row in shown} == {"torchao", "te"}
    for row in shown:
        recipe = row.of
        assert recipe.name in recipe.words.lower() or not recipe.words or recipe.words in text, recipe.name
    assert TRANSFORMER_ENGINE.words in text
