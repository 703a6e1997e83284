"""Every layer in FP8 gets another recipe of torchao, and a model without FP8 is converted."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

from fp8doctor.recipes import RECIPES
from fp8doctor.trial.treatments.apply import NotTried
from fp8doctor.trial.treatments.fp8_recipes import to_float8
from tests.examine.models import Stacked, network
from tests.trial.treated import applied, float8, in_fp8, same_parameters

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


class Rotated(Float8Linear):
    """A user's own layer, in the manner of research/patients/rotated.py."""

    def __init__(self, features: int) -> None:
        super().__init__(features, features, bias=False, config=Float8LinearConfig())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned, weight = self.before(x) @ self.rotation, self.scale * self.weight @ self.rotation
        return matmul_with_hp_or_float8_args.apply(turned, weight.t(), self.linear_mm_config, self.config)


def rotated() -> nn.Module:
    """One layer that has a buffer, a module, a Parameter and a number of its user's."""
    model = float8(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    layer = model[0]  # type: ignore[index]
    layer.__class__ = Rotated
    rotation = nn.init.orthogonal_(torch.empty(32, 32)).bfloat16()
    layer.register_buffer("rotation", rotation, persistent=False)
    layer.before, layer.scale = nn.Linear(32, 32).bfloat16(), 0.5
    layer.register_parameter("shift", nn.Parameter(torch.zeros(32)))
    return model


def test_another_recipe_leaves_a_layer_of_the_users_own_what_its_user_gave_it() -> None:
    model = rotated()
    model[0].compile(backend="eager")  # type: ignore[index]
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    before = model(x)
    changed = applied("recipe-rowwise", model).model
    assert type(changed[0]) is Rotated  # type: ignore[index]
    assert list(in_fp8(changed).values()) == ["rowwise"]
    assert list(in_fp8(model).values()) == ["tensorwise"]
    assert same_parameters(model, changed)
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in model.named_parameters()]
    after = changed(x)
    after.sum().backward()
    assert not torch.equal(before, after), "its forward multiplies under the other recipe"
    assert torch.allclose(before, after, atol=0.2)
    back = applied("recipe-tensorwise", changed).model
    assert torch.equal(before, back(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_was_put_on_a_layer_runs_under_the_other_recipe(compiled: bool) -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    layer = model[0]  # type: ignore[index]
    twice = MethodType(lambda self, x: 2 * Float8Linear.forward(self, x), layer)
    layer.forward = torch.compile(twice, backend="eager") if compiled else twice
    changed, x = applied("recipe-rowwise", model).model, torch.randn(16, 32, dtype=torch.bfloat16)
    assert not torch.equal(changed(x), model(x))
    assert torch.allclose(changed(x), model(x), atol=0.2)


def test_what_holds_a_layer_holds_it_under_the_other_recipe() -> None:
    """A list beside the modules, and the forward of a module that closes over it."""
    model = float8(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    model.layers = [model[0]]  # type: ignore[index]
    changed = applied("recipe-rowwise", model).model
    assert changed.layers == [changed[0]]  # type: ignore[index]
    assert in_fp8(changed) == {"0": "rowwise"}


class Adapted(Float8Linear):
    """A user's own layer with another inside, that cannot be pickled."""

    def __getstate__(self) -> None:
        raise RuntimeError

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        new = memo[id(self)] = Adapted.__new__(Adapted)
        vars(new).update({name: copy.deepcopy(each, memo) for name, each in vars(self).items()})
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.inner(x)


def test_a_layer_within_a_layer_is_under_the_other_recipe_too() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16())
    layer, layer.inner = model[0], model[1]  # type: ignore[index]
    layer.__class__ = Adapted
    assert in_fp8(applied("recipe-rowwise", nn.Sequential(layer)).model) == {
        "0": "rowwise",
        "0.inner": "rowwise",
    }


def test_a_parametrized_weight_stays_so_under_another_recipe() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32)).bfloat16())
    nn.utils.parametrizations.weight_norm(model[0])  # type: ignore[index]
    changed = applied("recipe-rowwise", model).model
    changed(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    assert set(in_fp8(changed).values()) == {"rowwise"}
    assert same_parameters(model, changed)


def test_no_other_recipe_without_a_float8_linear() -> None:
    with pytest.raises(NotTried, match="no Float8Linear"):
        applied("recipe-rowwise", Stacked())


def test_conversion_leaves_out_what_is_named_and_what_is_not_aligned() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "odd": nn.Linear(30, 32), "head": nn.Linear(32, 64)})
    converted = to_float8(model, "rowwise", skip=("head",))
    assert {name: type(layer).__name__ for name, layer in converted.items()} == {
        "a": "Float8Linear",
        "odd": "Linear",
        "head": "Linear",
    }  # type: ignore[operator]
    with pytest.raises(NotTried, match=r"no nn\.Linear that torchao could convert"):
        to_float8(nn.Sequential(nn.Conv1d(16, 16, 1)), "tensorwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_model_without_fp8_is_converted_but_for_its_head(recipe: str) -> None:
    converted = in_fp8(applied(f"convert-{recipe}", Stacked()).model)
    assert set(converted.values()) == {recipe}
    assert len(converted) == 6
