"""LORA003 on real PEFT and torchao models, in both orders, and on what Accelerate prepares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.facts import Facts
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]


def base() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    return LlamaForCausalLM(config).bfloat16()


def lora(model: Any, rank: int = 16) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def aligned(module: nn.Module, name: str) -> bool:
    return name != "lm_head" and all(side % 16 == 0 for side in module.weight.shape)


def test_conversion_after_lora(look: Look) -> None:
    finding = finding_of("LORA003", look(convert_to_float8_training(lora(base()))))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "28 of 28 LoRA matrices were converted to FP8"
    assert (finding.evidence["rank"], finding.evidence["converted_base_layers"]) == (16, 14)


def test_the_treatment_makes_it_silent(look: Look) -> None:
    finding = finding_of("LORA003", look(convert_to_float8_training(lora(base()))))
    assert finding is not None
    assert finding.treatment is not None
    model = lora(base())
    exec(finding.treatment.code, {"model": model, "convert_to_float8_training": convert_to_float8_training})
    facts = look(model)
    assert sum(linear.use == "training" for linear in facts.network.linears) == 15
    assert outcome_of("LORA003", facts).outcome == "healthy"


@pytest.mark.parametrize(
    "build",
    [
        lambda: lora(convert_to_float8_training(base())),
        lambda: convert_to_float8_training(lora(base(), rank=8), module_filter_fn=aligned),
        lambda: lora(base()),
    ],
    ids=["base first", "rank 8 and an aligned filter", "no FP8"],
)
def test_adapters_that_stay_as_they_are(build: Callable[[], nn.Module], look: Look) -> None:
    assert outcome_of("LORA003", look(build())).outcome == "healthy"


def test_accelerate_converts_what_is_aligned(forget_accelerate: None, look: Look) -> None:
    from accelerate.utils.ao import convert_model_to_fp8_ao

    model = lora(base())
    convert_model_to_fp8_ao(model)
    finding = finding_of("LORA003", look(model))
    assert finding is not None


def test_transformer_engine_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    te: Any = stand_in.install(monkeypatch, "quantization")
    model = lora(base())
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"] = te.Linear(64, 16, bias=False)
    finding = finding_of("LORA003", look(model))
    assert finding is not None
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
    assert finding.title == f"1 of 28 LoRA matrices were converted to FP8: {name} (64 x 16)"
    assert finding.treatment is not None
    assert "get_peft_model" in finding.treatment.code


def test_without_lora(look: Look) -> None:
    assert outcome_of("LORA003", look(convert_to_float8_training(base()))).outcome == "not_applicable"


def test_converted_adapters_train() -> None:
    """The disease is cost, not failure: nothing warns."""
    model = convert_to_float8_training(lora(base()))
    ids = torch.zeros(1, 16, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
