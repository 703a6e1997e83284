"""MOD004 on experts of real classes that a converter does not see, and on wrapped ones that no FP8 matmul
reaches. `tests/checks/engagement/test_partial_conversion.py` has Mixtral's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.quantization import quantize_
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fp8doctor.facts import Facts
from research.complaints import torchtitan_3199
from tests.checks.rules import found_by, outcome_of

Look = Callable[..., Facts]

PARTIAL, EXPERTS_RULE = "partial-conversion", "experts-not-reached"
FOUR = {"num_hidden_layers": 1, "vocab_size": 1024, "num_local_experts": 4}
EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "JetMoe": lambda: JetMoeForCausalLM(JetMoeConfig(hidden_size=4096, **FOUR)),
    "GPT-OSS": lambda: GptOssForCausalLM(GptOssConfig(**FOUR)),
    "Llama 4": lambda: Llama4ForCausalLM(Llama4TextConfig(**FOUR)),
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return EXPERTS[name]().bfloat16()


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_no_line_converts(name: str, look: Look) -> None:
    """JetMoe multiplies one expert after the other, Llama 4 by bmm; those of GPT-OSS lie as [in, out]."""
    model = convert_to_float8_training(on_meta(name), module_filter_fn=lambda module, name: name != "lm_head")
    finding = found_by(PARTIAL, look(model))
    assert finding.evidence["reasons"] == ("experts-by-grouped-gemm",)
    assert finding.treatment.kind == "sketch"


def test_experts_are_told_by_their_weights_where_nobody_says_how_many_a_token_visits(look: Look) -> None:
    facts = look(torchtitan_3199.build_model())
    assert found_by(PARTIAL, facts).evidence["reasons"] == ("convert-experts",)
    without = tuple(each for each in facts.network.linears if each.role != "experts")
    left_out = tuple(replace(each, use="none", stack="torch") for each in without[:1])
    network = replace(facts.network, linears=(*left_out, *without[1:]))
    assert outcome_of(PARTIAL, replace(facts, network=network)) == "unknown"


def with_wrapped_experts(name: str) -> Any:
    model = on_meta(name)
    experts = {"JetMoe": "ParallelExperts"}.get(name, "Experts")
    quantize_(
        model,
        Float8TrainingOpConfig(),
        filter_fn=lambda module, _: type(module).__name__.endswith(experts),
    )
    return model


@pytest.mark.parametrize("name", ["Llama 4", "JetMoe"])
def test_experts_whose_class_has_no_grouped_gemm(name: str, look: Look) -> None:
    facts = look(with_wrapped_experts(name))
    assert not [linear for linear in facts.network.linears if linear.use == "training"]


@pytest.mark.parametrize("vocabulary", [1024, 151936])
def test_where_little_is_left_beside_small_experts_fp8_is_to_be_left_off(vocabulary: int, look: Look) -> None:
    """Whatever the head is: by good custom it is left out."""
    config = Qwen3MoeConfig(num_hidden_layers=1, vocab_size=vocabulary)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "attn" in name)
    finding = found_by(EXPERTS_RULE, look(model, tokens=4096))
    assert (finding.severity, finding.treatment.name) == ("warning", "stay-in-bf16")
