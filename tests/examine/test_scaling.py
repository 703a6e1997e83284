"""How FP8 layers scale, read from real torchao configurations; Transformer Engine's is in the tests of
NUM003."""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingType

from fp8doctor.examine.linears import examine_scaling
from fp8doctor.examine.walk import walk
from fp8doctor.facts import Scaling


def linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).bfloat16()


def scaling(layers: int, first: str, *forward: str) -> Scaling:
    return Scaling(
        stack="torchao",
        layers=layers,
        first=first,
        forward_dtypes=forward,
        amax_history_len=None,
        amax_compute_algo=None,
    )


def test_layers_that_do_not_are_several() -> None:
    model = linears()
    e5m2 = Float8LinearConfig(cast_config_weight=CastConfig(target_dtype=torch.float8_e5m2))
    convert_to_float8_training(model, config=e5m2, module_filter_fn=lambda module, name: name == "1")
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "1")
    assert examine_scaling(walk(model)) == (
        scaling(2, "0", "float8_e4m3fn"),
        scaling(1, "1", "float8_e4m3fn", "float8_e5m2"),
    )


def test_an_operand_in_high_precision_is_in_no_dtype_of_fp8() -> None:
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    assert config.cast_config_input_for_grad_weight.scaling_type is ScalingType.DISABLED
    assert examine_scaling(walk(convert_to_float8_training(linears(), config=config))) == (
        scaling(3, "0", "float8_e4m3fn"),
    )
