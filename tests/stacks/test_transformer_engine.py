"""What is read from Transformer Engine modules. On a stand-in: the library cannot be built without a GPU."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.facts import Linear, recorded
from tests.examine.models import network
from tests.looked import looked
from tests.stand_ins import transformer_engine as stand_in


@pytest.fixture(params=["quantization", "fp8"])
def te(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    return stand_in.install(monkeypatch, request.param)


def linears(model: nn.Module, gaps: dict[str, str] | None = None) -> tuple[Linear, ...]:
    return network(nn.Sequential(model), gaps).linears


PACKAGE = "transformer_engine.pytorch.module"
MEGATRON = {"__module__": "megatron.core.extensions.transformer_engine"}

LAYERS: dict[str, tuple[Callable[[ModuleType], nn.Module], list[tuple[Any, ...]]]] = {
    "linear.Linear": (lambda te: te.Linear(32, 64), [("0", 32, 64, 1, True)]),
    "layernorm_linear.LayerNormLinear": (
        lambda te: te.LayerNormLinear(32, 64, bias=False),
        [("0", 32, 64, 1, False)],
    ),
    "layernorm_mlp.LayerNormMLP": (
        lambda te: te.LayerNormMLP(32, 48),
        [("0.fc1", 32, 96, 1, True), ("0.fc2", 48, 32, 1, False)],
    ),
    "grouped_linear.GroupedLinear": (lambda te: te.GroupedLinear(4, 32, 64), [("0", 32, 64, 4, False)]),
}
"""Class -> an object of it, and name, in and out features, GEMMs and bias of each layer in it."""


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, te: ModuleType) -> None:
    build, expected = LAYERS[kind]
    found = linears(build(te))
    shapes = [(each.name, each.in_features, each.out_features, each.gemms, each.bias) for each in found]
    assert shapes == expected
    for each in found:
        assert (each.kind, each.stack, each.use) == (f"{PACKAGE}.{kind}", "transformer_engine", "training")
        assert (each.recipe, each.engaged, each.dtype) == (None, None, "float32")
        weights = each.gemms * each.in_features * each.out_features
        assert each.parameters == weights + each.bias * each.out_features, "without those of the norm"
        assert not any(each.features.values())


def test_grouped_linear_is_experts(te: ModuleType) -> None:
    layer = te.GroupedLinear(4, 32, 64)
    layer.top_k = 2
    (found,) = linears(layer)
    assert (found.role, found.flops_per_token) == ("experts", 2 * 2 * 32 * 64 * 3)


def test_megatrons_subclass(te: ModuleType) -> None:
    (layer,) = linears(type("TELinear", (te.Linear,), MEGATRON)(32, 64))
    assert layer.kind == f"{PACKAGE}.linear.Linear"


@pytest.mark.parametrize(
    ("forwards", "engaged", "recipe"),
    [((), None, None), ((True,), True, "delayed"), ((False,), False, None), ((True, False), None, "delayed")],
    ids=["never ran", "fp8", "no autocast", "fp8, then recomputed outside"],
)
def test_engaged(
    te: ModuleType, forwards: tuple[bool, ...], engaged: bool | None, recipe: str | None
) -> None:
    layer = te.Linear(32, 64)
    for enabled in forwards:
        with stand_in.autocast(enabled):
            layer(torch.zeros(4, 32))
    (found,) = linears(layer)
    assert (found.engaged, found.recipe) == (engaged, recipe)
    assert found.features["fp8_ran_before"] is (forwards == (True, False))


@pytest.mark.parametrize(
    ("recipe", "name"), [(stand_in.Float8CurrentScaling, "current"), (stand_in.MXFP8BlockScaling, "mxfp8")]
)
def test_recipe(te: ModuleType, recipe: Callable[[], Any], name: str) -> None:
    layer = te.Linear(32, 64)
    with stand_in.autocast(True, recipe()):
        layer(torch.zeros(4, 32))
    assert linears(layer)[0].recipe == name


def test_a_backward_in_16_bits_is_no_known_recipe(te: ModuleType) -> None:
    layer, recipe = te.Linear(32, 64), stand_in.MXFP8BlockScaling()
    vars(recipe).update(backward_override="high_precision", disable_rht=True)
    with stand_in.autocast(True, recipe):
        layer(torch.zeros(4, 32))
    (found,) = linears(layer)
    assert found.recipe == "custom"
    assert found.features["disable_rht"] is True


def test_attention_that_the_recipe_puts_in_fp8_leaves_the_speedup_open(te: ModuleType) -> None:
    batch = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    for asked, status in ((False, "fp8_faster"), (True, "open")):
        with torch.device("meta"):
            model = nn.Sequential(te.Linear(4096, 4096), te.Linear(4096, 4096)).bfloat16()
        vars(recipe := stand_in.Float8CurrentScaling()).update(fp8_mha=asked)
        with stand_in.autocast(enabled=True, recipe=recipe):
            model(batch)
        assert looked(model, batch, assume_gpu="H100").verdict.status == status


def test_weights_built_in_fp8(te: ModuleType) -> None:
    layer = te.Linear(32, 64)
    layer.primary_weights_in_fp8 = True
    assert linears(layer)[0].features["primary_weights_in_fp8"]


def test_without_its_record_engaged_is_unknown(te: ModuleType) -> None:
    layer, gaps = te.Linear(32, 64), {}
    del layer.fp8_meta
    (found,) = linears(layer, gaps)
    assert not recorded(found, "engaged")
    assert not recorded(found, "recipe")
    assert gaps == {
        "network.linears.engaged": "this Transformer Engine module keeps no record where 1.0 to 2.20 do"
    }
