"""Every layer in FP8 gets another recipe of torchao, and a model without FP8 is converted."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.facts import Workload
from fp8doctor.recipes import RECIPES
from fp8doctor.trial.treatments.apply import NotTried
from tests.examine.models import Stacked, network
from tests.trial.treated import applied, facts, float8, in_fp8

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", [each.name for each in RECIPES.values() if each.operands])
@pytest.mark.parametrize(
    "settings",
    [{}, {"enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}],
    ids=["plain", "as Accelerate sets it"],
)
def test_another_recipe_is_read_back_from_every_layer(recipe: str, settings: dict[str, bool]) -> None:
    model = float8(Stacked(), **settings)
    model.blocks[1].compile(backend="eager")
    changed = applied(f"recipe-{recipe.replace('_', '-')}", model).model
    assert list(in_fp8(changed).values()) == [recipe] * 6
    assert set(in_fp8(model).values()) == {"tensorwise"}
    assert {linear.features["pad_inner_dim"] for linear in network(changed).linears if linear.features} == {
        "pad_inner_dim" in settings
    }
    assert changed.blocks[1]._compiled_call_impl is not None  # type: ignore[union-attr, index]
    changed(torch.arange(32).reshape(2, 16)).sum().backward()


@pytest.mark.parametrize("rows", [4096, 4090])
def test_conversion_leaves_out_a_layer_of_few_rows_that_would_raise(rows: int) -> None:
    """A diffusion transformer's times had 24 rows, so the whole trial had no FP8 (H200)."""
    model, known = Stacked(), facts(Stacked())
    seen = {each.name: (rows,) for each in known.network.linears} | {"blocks.0.up": (24,)}
    known = replace(known, workload=Workload(rows=seen))
    converted = in_fp8(applied("convert-tensorwise", model, known=known).model)
    assert len(converted) == 5
    assert "blocks.0.up" not in converted


def test_conversion_leaves_out_the_head_and_what_is_not_aligned() -> None:
    model = Stacked()
    model.blocks[0].up, model.blocks[0].down = nn.Linear(32, 60), nn.Linear(60, 32)
    converted = in_fp8(applied("convert-rowwise", model).model)
    assert converted == dict.fromkeys(
        (f"blocks.{n}.{side}" for n in (1, 2) for side in ("up", "down")), "rowwise"
    )
    with pytest.raises(NotTried, match=r"no nn\.Linear that torchao could convert"):
        applied("convert-tensorwise", nn.Sequential(nn.Conv1d(16, 16, 1)))
