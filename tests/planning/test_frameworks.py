"""The printed set-ups: Python runs on a real model, the rest is whole."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import TrainingArguments

from fp8doctor.cli.pages import FRAMEWORKS
from fp8doctor.planned import facts_of
from fp8doctor.planning.estimates import Row
from fp8doctor.planning.job_options import Options
from fp8doctor.planning.plan_document import setups
from tests.examine.models import llama


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
