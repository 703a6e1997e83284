"""Adapters are told by what PEFT's tuners call their own, not by LoRA's names alone."""

from __future__ import annotations

import pytest
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn

from fp8doctor.examine.module_facts import examine_network
from fp8doctor.examine.walk import walk

TARGETS = ["0", "2"]


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
        OFTConfig(target_modules=TARGETS, oft_block_size=16, r=0),
        IA3Config(target_modules=TARGETS, feedforward_modules=[]),
        VeraConfig(target_modules=TARGETS, r=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_what_a_tuner_trains_is_an_adapter_and_what_it_wraps_is_not(config: PeftConfig) -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), config)
    network = examine_network(walk(model), {})
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert network.adapter_parameters >= trained > 0
    assert network.adapter_parameters < network.parameters
    of_the_base = [each.adapter for each in network.linears if each.name.endswith("base_layer")]
    assert of_the_base == ["base", "base"]
    assert {each.adapter for each in network.linears} <= {"base", "adapter"}
