"""nanochat's own Float8Linear: recognized, counted, costed, and left in BF16 by its own converter."""

import pytest
import torch
from torch import nn

from fp8doctor import inspect_model
from fp8doctor.analysis.compile_coverage import needs_compile
from fp8doctor.recipes import RECIPES, recipe_of
from fp8doctor.stacks import bf16_counterpart, recognise
from tests.examine.models import Stacked
from tests.stand_ins.nanochat import Float8Linear, convert_to_float8_training
from tests.stand_ins.scaled_mm import needs_scaled_mm

TENSORWISE = RECIPES["nanochat", "tensorwise"]


def converted() -> nn.Module:
    return convert_to_float8_training(Stacked())


@pytest.mark.slow
def test_its_layers_are_fp8_layers_with_a_recipe() -> None:
    linears = inspect_model(converted(), trial=False).facts.network.linears
    layer = linears[0]
    assert {each.stack for each in linears} == {"nanochat"}
    assert (layer.use, layer.recipe, layer.kind) == ("training", "tensorwise", "nanochat.fp8.Float8Linear")
    assert recipe_of(layer) == TENSORWISE
    assert needs_compile(layer)
    assert not layer.features  # its forward is known


def test_a_class_of_that_name_from_elsewhere_is_the_users_own() -> None:
    other = type("Float8Linear", (Float8Linear,), {"__module__": "train"})
    assert {each.stack for each in recognise(other(32, 32), {})} == {"nanochat"}  # it descends from it
    copied = type("Float8Linear", (nn.Linear,), {"__module__": "train", "forward": Float8Linear.forward})
    assert {(each.stack, each.use) for each in recognise(copied(32, 32), {})} == {("own", "unknown")}


@needs_scaled_mm
def test_the_bf16_form_has_its_weights_and_computes_the_same() -> None:
    layer = Float8Linear(64, 32)
    twin = bf16_counterpart(layer)
    x = torch.randn(16, 64)
    assert type(twin) is not Float8Linear
    assert twin.weight is layer.weight
    assert torch.allclose(twin(x).float(), layer(x).float(), atol=0.15)
