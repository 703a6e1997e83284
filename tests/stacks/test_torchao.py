"""What is read from torchao's modules and tensors, on the real library; older releases by their class
names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, ScalingGranularity
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    quant_api,
    quantize_,
)

from fp8doctor.facts import Linear
from tests import prototypes
from tests.examine.models import network

INT8 = Int8WeightOnlyConfig(
    **({"version": 2} if "version" in vars(Int8WeightOnlyConfig)["__dataclass_fields__"] else {})
)
"""Weights of the newest class that this torchao has."""

CHECKS_HARDWARE = hasattr(quant_api, "_check_hardware_support")
"""Since when dynamic activations are quantized on a CPU once this is put aside, and weights say whether they
are; not in torchao 0.9."""


def only(model: nn.Module) -> Linear:
    (layer,) = network(nn.Sequential(model)).linears
    return layer


def converted(config: Float8LinearConfig, bias: bool = True) -> nn.Module:
    return convert_to_float8_training(nn.Linear(32, 64, bias=bias, dtype=torch.bfloat16), config=config)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipe_is_read_back(recipe: str) -> None:
    layer = only(converted(Float8LinearConfig.from_recipe_name(recipe)))
    assert layer.kind == "torchao.float8.float8_linear.Float8Linear"
    assert (layer.stack, layer.use, layer.recipe) == ("torchao", "training", recipe)
    assert (layer.in_features, layer.out_features, layer.bias, layer.dtype) == (32, 64, True, "bfloat16")
    assert (layer.weight_class, layer.engaged) == (None, None)


def test_any_other_casts_are_custom() -> None:
    casts = ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
    by_row = {name: CastConfig(scaling_granularity=ScalingGranularity.AXISWISE) for name in casts}
    config = Float8LinearConfig(**by_row)
    assert config.cast_config_grad_output.target_dtype == torch.float8_e5m2  # rowwise but for this
    assert only(converted(config)).recipe == "custom"


def test_settings() -> None:
    assert only(converted(Float8LinearConfig())).features == {
        "emulate": False,
        "pad_inner_dim": False,
        "enable_fsdp_float8_all_gather": False,
        "use_fast_accum": True,
    }
    changed = only(converted(Float8LinearConfig(emulate=True, pad_inner_dim=True))).features
    assert changed["emulate"]
    assert changed["pad_inner_dim"]


def test_all_gather_wrapper_is_a_setting_not_a_kind() -> None:
    layer = only(converted(Float8LinearConfig(enable_fsdp_float8_all_gather=True)))
    assert layer.use == "training"
    assert layer.weight_class == "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"
    assert layer.features["enable_fsdp_float8_all_gather"]
    assert layer.features["float8_all_gather_weight"]
    assert layer.features["precomputed_scale"] is False


def test_without_configuration_the_recipe_is_a_gap() -> None:
    layer, gaps = converted(Float8LinearConfig()), {}
    del layer.config
    (found,) = network(nn.Sequential(layer), gaps).linears
    assert (found.use, found.recipe, found.features) == ("training", None, {})
    assert "Float8LinearConfig" in gaps["network.linears.recipe"]


WRAPPED = "TrainingWeightWrapperTensor"


@pytest.mark.parametrize(
    ("config", "weight_class", "recipe", "emulate"),
    [
        (lambda: prototypes.mxfp8("MXFP8_EMULATED_RCEIL"), f"MXFP8{WRAPPED}", "mxfp8", True),
        (lambda: prototypes.mxfp8(), f"MXFP8{WRAPPED}", "mxfp8", False),
        (
            lambda: prototypes.float8(float8_linear_recipe="tensorwise"),
            f"Float8{WRAPPED}",
            "tensorwise",
            None,
        ),
    ],
)
def test_training_weights(
    config: Callable[[], Any], weight_class: str, recipe: str, emulate: bool | None
) -> None:
    model = nn.Sequential(nn.Linear(32, 64, dtype=torch.bfloat16))
    quantize_(model, config(), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    layer = only(model)
    assert layer.kind == "torch.nn.modules.linear.Linear"
    assert (layer.stack, layer.use, layer.recipe) == ("torchao", "training", recipe)
    assert layer.weight_class == f"torchao.prototype.moe_training.tensor.{weight_class}"
    assert (layer.dtype, layer.requires_grad) == ("bfloat16", True)
    assert layer.features.get("emulate") is emulate


@pytest.mark.parametrize(
    ("config", "dtype", "features"),
    [
        (Float8WeightOnlyConfig(), "float8_e4m3fn", {"activations_quantized": False}),
        pytest.param(
            Float8DynamicActivationFloat8WeightConfig(),
            "float8_e4m3fn",
            {"activations_quantized": True},
            marks=pytest.mark.skipif(
                not CHECKS_HARDWARE,
                reason="torchao 0.9 has no quant_api._check_hardware_support to put aside on a CPU",
            ),
        ),
        (INT8, "int8", {"activations_quantized": False}),
    ],
)
def test_quantized_weights_are_storage(
    monkeypatch: pytest.MonkeyPatch, config: Any, dtype: str, features: dict[str, bool]
) -> None:
    monkeypatch.setattr("torchao.quantization.utils.recommended_inductor_config_setter", lambda: None)
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None, raising=False)
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16, bias=False))
    quantize_(model, config)
    facts = network(nn.Sequential(model))
    (layer,) = facts.linears
    assert (layer.stack, layer.use, layer.dtype, layer.requires_grad) == ("torchao", "storage", dtype, False)
    assert layer.features == (features if CHECKS_HARDWARE else {})
    assert layer.recipe is None
    assert layer.weight_class is not None
    assert layer.weight_class.startswith("torchao.")
    assert facts.dtypes == {dtype: 4096}


def test_plain_float8_parameters_are_storage() -> None:
    layer = nn.Linear(32, 64, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e5m2), requires_grad=False)
    facts = network(nn.Sequential(layer))
    (found,) = facts.linears
    assert (found.stack, found.use, found.dtype) == ("torch", "storage", "float8_e5m2")
    assert facts.float8_parameters == 1
