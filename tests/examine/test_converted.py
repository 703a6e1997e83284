"""Layers under LoRA, and those that a converter changed, as facts."""

import pytest
from peft import IA3Config, LoraConfig, OFTConfig, PeftConfig, VeraConfig, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training

from tests.examine.models import by_name, llama, lora, low_rank, network


def test_a_converted_output_projection_that_nothing_calls_does_not_train_in_fp8() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.MultiheadAttention(64, 4)))
    layer = by_name(model)["0.out_proj"]
    assert layer.kind.endswith(".Float8Linear")
    assert layer.use == "none"
    assert layer.features["functional"] is True


def test_lora_on_a_plain_base() -> None:
    facts = network(lora(llama(), modules_to_save=["lm_head"]))
    assert (facts.parameters, facts.trainable_parameters, facts.adapter_parameters) == (155968, 49152, 32768)
    linears = {each.name.removeprefix("base_model.model.model.layers."): each for each in facts.linears}
    base, a = linears["1.self_attn.q_proj.base_layer"], linears["1.self_attn.q_proj.lora_A.default"]
    assert (base.adapter, base.requires_grad, base.flops_per_token) == ("base", False, 2 * 2 * 64 * 64)
    assert (a.adapter, a.requires_grad, a.in_features, a.out_features) == ("adapter", True, 64, 16)
    first = linears["0.self_attn.q_proj.base_layer"]  # nothing before it is trained
    assert (a.flops_per_token, first.flops_per_token) == (6 * 64 * 16, 2 * 64 * 64)
    assert facts.linears[-1].name == "base_model.model.lm_head.modules_to_save.default"
    assert (facts.linears[-1].role, facts.linears[-1].adapter) == ("head", None)
    assert not any("original_module" in each.name for each in facts.linears)


def test_lora_before_and_after_conversion() -> None:
    def kinds(model: nn.Module) -> set[tuple[str | None, str]]:
        body = (each for each in network(model).linears if each.role == "body")
        return {(each.adapter, each.kind.rpartition(".")[2]) for each in body}

    base = ("base", "Float8Linear")
    assert kinds(lora(convert_to_float8_training(llama()))) == {base, ("adapter", "Linear")}
    assert kinds(convert_to_float8_training(lora(llama()))) == {base, ("adapter", "Float8Linear")}


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
    facts = network(model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert facts.adapter_parameters >= trained > 0
    assert facts.adapter_parameters < facts.parameters
    of_the_base = [each.adapter for each in facts.linears if each.name.endswith("base_layer")]
    assert of_the_base == ["base", "base"]
    assert {each.adapter for each in facts.linears} <= {"base", "adapter"}


@pytest.mark.parametrize(
    ("down", "up"),
    [("lora_down", "lora_up"), ("lora_layer.down", "lora_layer.up"), ("A", "B")],
    ids=["kohya", "diffusers", "own"],
)
def test_two_thin_linears_beside_a_frozen_one_adapt_it(down: str, up: str) -> None:
    for trained, parts in ((False, ["base", "adapter", "adapter"]), (True, None)):
        base = nn.Linear(64, 64, bias=False).requires_grad_(trained)
        facts = network(nn.Sequential(low_rank(base, down, up), nn.Linear(64, 4), nn.Linear(4, 64)))
        found = {each.name: each.adapter for each in facts.linears}
        assert (found.pop("1"), found.pop("2")) == (None, None)  # a bottleneck with no base beside it
        if parts:
            assert list(found.values()) == parts
            assert {each.layer for each in facts.linears if each.adapter} == {"0"}
            assert facts.adapter_parameters == 2 * 4 * 64
        elif not down.startswith("lora_"):
            assert set(found.values()) == {None}
