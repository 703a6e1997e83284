"""The printed set-ups: Python runs on a real model, the rest is whole."""

from __future__ import annotations

import ast

import pytest
import torch
import yaml
from msgspec.structs import replace
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.cli.plan import FRAMEWORKS
from fp8doctor.planned import facts_of
from fp8doctor.planning.frameworks import setups
from fp8doctor.planning.options import Options
from fp8doctor.planning.rows import Row
from fp8doctor.recipes import RECIPES
from tests.examine.models import llama


def lines(stack: str, recipe: str, **options: int) -> dict[str, str]:
    row = Row(gpu="H100", stack=stack, recipe=recipe, compiled=True, gpu_memory_gib=80)
    return setups(facts_of(llama(dtype=torch.bfloat16), 1, 16), row, Options(**options))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
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


@pytest.mark.parametrize(
    ("stack", "recipe"),
    [
        *(("torchao", recipe) for recipe in ("tensorwise", "rowwise", "mxfp8")),
        *(("te", recipe) for recipe in ("delayed", "current", "blockwise", "mxfp8")),
    ],
)
def test_every_line_can_be_read(stack: str, recipe: str) -> None:
    found = lines(stack, recipe)
    for framework in found.keys() & {"pytorch", "accelerate", "te"}:
        ast.parse(found[framework])
    if "axolotl" in found:
        assert yaml.safe_load(found["axolotl"]) == {
            "fp8": True,
            "fp8_config": {"recipe": recipe},
            "torch_compile": True,
        }


def test_the_command_line_knows_every_framework() -> None:
    assert {*lines("torchao", "tensorwise"), *lines("te", "delayed")} == set(FRAMEWORKS)


def test_what_no_library_confirms_has_no_lines() -> None:
    assert "megatron" not in lines("te", "mxfp8")
    assert "trl" not in lines("torchao", "rowwise")
    assert "later ones have rowwise only" in lines("torchao", "tensorwise")["torchtitan"]


def test_a_recipe_that_torchao_does_not_name_is_configured_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a recipe that is added with a configuration of its own."""
    plain = RECIPES[("torchao", "tensorwise")]
    config = "Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn))"
    own = replace(plain, name="tensorwise_e4m3", config=config)
    monkeypatch.setitem(RECIPES, ("torchao", "tensorwise_e4m3"), own)
    found = lines("torchao", "tensorwise_e4m3")
    assert found.keys() == {"pytorch", "accelerate"}
    assert all(config in code and "from_recipe_name" not in code for code in found.values())
