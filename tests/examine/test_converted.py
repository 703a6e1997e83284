"""Layers under LoRA, and those that a converter changed, as facts."""

from __future__ import annotations

from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import quantize_

from tests import prototypes
from tests.examine.models import by_name, llama, lora, network, qwen3_moe


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


def test_converted_experts_of_qwen3_moe() -> None:
    model = qwen3_moe().bfloat16()
    quantize_(model, prototypes.float8(), filter_fn=lambda module, name: name.endswith("experts"))
    layer = by_name(model)["model.layers.0.mlp.experts.gate_up_proj"]
    assert (layer.stack, layer.use, layer.recipe) == ("torchao", "training", "rowwise")
    assert (layer.gemms, layer.role, layer.kind.rpartition(".")[2]) == (8, "experts", "Qwen3MoeExperts")
