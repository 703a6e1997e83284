"""Plans of public architectures, built on the meta device."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import TrainingArguments

import fp8doctor
from fp8doctor import Plan
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.cli.pages import FRAMEWORKS
from fp8doctor.cost.step_cost import in_bf16, in_fp8, modelled_step, with_linears_compiled
from fp8doctor.gpus import gpu_spec
from fp8doctor.planned import facts_of
from fp8doctor.planning import estimates
from fp8doctor.planning.estimates import Row
from fp8doctor.planning.form import experts_ms, weights_cast
from fp8doctor.planning.job_options import Options, share_of
from fp8doctor.planning.plan_document import setups
from fp8doctor.recipes import RECIPES, TRANSFORMER_ENGINE
from tests.configurations import LLAMA_8B
from tests.examine.models import llama


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


TENSORWISE, DELAYED = RECIPES["torchao", "tensorwise"], RECIPES["transformer_engine", "delayed"]


def test_weights_are_cast_once_where_they_are_kept_or_gathered() -> None:
    assert weights_cast(TENSORWISE, Options(accumulate=4)) == 1
    assert weights_cast(TENSORWISE, Options(accumulate=4, dp=8)) == 1 / 8
    assert weights_cast(TENSORWISE, Options(accumulate=4, dp=8, sharding="ddp")) == 1
    assert weights_cast(DELAYED, Options(accumulate=4)) == 1 / 4


def test_each_recipe_stands_beside_bf16_of_its_framework() -> None:
    facts = facts_of(LLAMA_8B, None, None)
    found = estimates.rows(facts, ["H100"], Options(tp=8))
    bf16 = {
        stack: {each.bf16_step_ms for each in found if each.stack == stack} for stack in ("torchao", "te")
    }
    assert all(len(times) == 1 for times in bf16.values())
    assert max(bf16["te"]) < min(bf16["torchao"])


def test_tokens_leave_a_host_through_one_adapter_and_stay_on_it_for_its_links() -> None:
    """Ranks of tensor parallelism exchange their part of the tokens."""
    facts = facts_of({"model_type": "qwen3_moe", "num_hidden_layers": 2}, None, None)
    times = {}
    for ep, tp in ((8, 1), (16, 1), (8, 2)):
        options = Options(dp=16, tp=tp, ep=ep)
        times[ep, tp] = experts_ms(share_of(in_bf16(facts), options), options, gpu_spec("H100"))
    assert times[16, 1] / times[8, 1] == pytest.approx((8 / 16 / 50) / (7 / 8 / 450))
    assert times[8, 2] / times[16, 1] == pytest.approx(1 / 2)


def lines(stack: str, recipe: str, **options: int) -> dict[str, str]:
    row = Row(gpu="H100", stack=stack, recipe=recipe, gpu_memory_gib=80)
    return setups(facts_of(llama(dtype=torch.bfloat16), 1, 16), row, Options(**options))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_pytorch_converts_all_but_the_head_and_compiles(recipe: str) -> None:
    model = llama(dtype=torch.bfloat16)
    exec(compile(lines("torchao", recipe)["pytorch"], "pytorch", "exec"), {"model": model})
    converted = [name for name, each in model.named_modules() if isinstance(each, Float8Linear)]
    assert len(converted) == 14
    assert "lm_head" not in converted
    assert all(block._compiled_call_impl is not None for block in model.model.layers)


@pytest.mark.parametrize("ranks", [1, 8])
def test_fp8_is_gathered_only_where_weights_are_sharded(ranks: int) -> None:
    found = lines("torchao", "tensorwise", dp=ranks)
    for framework in ("pytorch", "torchtitan", "accelerate", "axolotl"):
        assert ("fsdp_float8_all_gather" in found[framework]) is (ranks > 1), framework
    assert "fsdp_float8_all_gather" not in "".join(lines("torchao", "rowwise", dp=8).values())


def test_every_line_can_be_read_and_the_command_line_knows_every_framework() -> None:
    known: set[str] = set()
    for stack, recipes in (
        ("torchao", ("tensorwise", "rowwise", "mxfp8")),
        ("te", ("delayed", "current", "blockwise", "mxfp8")),
    ):
        for recipe in recipes:
            found = lines(stack, recipe)
            known |= found.keys()
            for framework in found.keys() & {"pytorch", "accelerate", "te"}:
                assert ast.parse(found[framework]).body, (recipe, framework)
    assert known == set(FRAMEWORKS)


@pytest.mark.usefixtures("forget_accelerate")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_accelerate_converts_with_the_recipe(recipe: str) -> None:
    """accelerate 1.15 leaves out the first and the last Linear."""
    names: dict[str, Any] = {}
    exec(compile(lines("torchao", recipe)["accelerate"], "accelerate", "exec"), names)
    model = names["accelerator"].prepare(llama(dtype=torch.bfloat16))
    converted = [each for each in model.modules() if isinstance(each, Float8Linear)]
    expected = Float8LinearConfig.from_recipe_name(recipe)
    assert len(converted) == 13
    assert all(each.config.cast_config_input == expected.cast_config_input for each in converted)


@pytest.mark.usefixtures("forget_accelerate")
def test_a_trainer_reads_what_the_lines_for_trl_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SFTConfig of TRL 1.16 is a TrainingArguments of transformers whose bf16 is on by default."""
    exported = lines("torchao", "tensorwise")["trl"].splitlines()[0].removeprefix("export ").split()
    for each in exported:
        monkeypatch.setenv(*each.split("="))
    for bf16, precision in ((False, "fp8"), (True, "bf16")):
        given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=bf16, report_to="none")
        assert given.mixed_precision == precision
    assert Accelerator(mixed_precision="fp8", cpu=True).fp8_backend == "AO"


@pytest.mark.usefixtures("forget_accelerate")
def test_lora_keeps_its_matrices() -> None:
    assert [lines("torchao", each, lora=16)["pytorch"][0] for each in ("tensorwise", "rowwise")] == ["#", "#"]
    names: dict[str, Any] = {}
    exec(compile(lines("torchao", "tensorwise", lora=16)["accelerate"], "accelerate", "exec"), names)
    base = llama(dtype=torch.bfloat16)
    model = names["accelerator"].prepare(get_peft_model(base, LoraConfig(r=16, target_modules="all-linear")))
    converted = [name for name, each in model.named_modules() if isinstance(each, Float8Linear)]
    assert len(converted) == 14
    assert all(name.endswith("base_layer") for name in converted)


def test_axolotl_has_only_tensorwise() -> None:
    """axolotl 067b021: AxolotlTrainer.additional_accelerator_args makes a Float8LinearConfig without recipe;
    check_fp8_config refuses the gather without fsdp_version 2."""
    assert yaml.safe_load(lines("torchao", "tensorwise", dp=8)["axolotl"]) == {
        "fp8": True,
        "fp8_enable_fsdp_float8_all_gather": True,
        "fsdp_version": 2,
        "torch_compile": True,
    }
    assert not any("axolotl" in lines("torchao", each) for each in ("rowwise", "rowwise_with_gw_hp", "mxfp8"))


def test_experts_are_converted_to_mxfp8_as_the_plan_counts_them() -> None:
    facts = facts_of({"model_type": "mixtral", "num_hidden_layers": 1}, None, None)
    row = Row(gpu="B200", stack="torchao", recipe="mxfp8", gpu_memory_gib=180)
    found = setups(facts, row, Options())
    assert "type(layer).__name__ in ('MixtralExperts',)" in found["pytorch"]
    assert "MXFP8GroupedExpertsConverter.Config(" in found["torchtitan"]
    assert "Experts" not in "".join(lines("torchao", "mxfp8").values())


def test_the_recipe_of_now_is_not_that_of_another_row() -> None:
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    model = llama(dtype=torch.bfloat16)
    convert_to_float8_training(model, config=rowwise, module_filter_fn=lambda _, name: name != "lm_head")
    facts = facts_of(model, 1, 16)
    row = Row(gpu="H100", stack="torchao", recipe="tensorwise", gpu_memory_gib=80)
    assert setups(facts, row, Options()) == lines("torchao", "tensorwise")
