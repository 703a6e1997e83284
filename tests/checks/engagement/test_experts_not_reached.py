"""MOD012 on real experts of transformers, wrapped by torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.quantization import quantize_
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fp8doctor.facts import Facts
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 1024}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES)),
    "Llama 4": lambda: Llama4ForCausalLM(Llama4TextConfig(**SIZES)),
    "JetMoe": lambda: JetMoeForCausalLM(JetMoeConfig(**SIZES, hidden_size=4096)),
    "Qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_hidden_layers=1, num_experts=16, moe_intermediate_size=768, vocab_size=1024)
    ),
}


def made(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return MODELS[name]().bfloat16()


def wrapped(name: str) -> PreTrainedModel:
    model = made(name)
    experts = {"JetMoe": "ParallelExperts"}.get(name, "Experts")
    quantize_(
        model,
        Float8TrainingOpConfig(),
        filter_fn=lambda module, _: type(module).__name__.endswith(experts),
    )
    return model


@pytest.mark.parametrize(("name", "operator"), [("Llama 4", "bmm"), ("JetMoe", "linear")])
def test_experts_whose_class_has_no_grouped_gemm(name: str, operator: str, look: Look) -> None:
    facts = look(wrapped(name))
    finding = finding_of("MOD012", facts)
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.evidence["operators"] == (operator,)
    assert finding.treatment is not None
    assert finding.treatment.kind == "sketch"
    assert not [linear for linear in facts.network.linears if linear.use == "training"]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_line_lets_the_wrapper_see_the_product(implementation: str, look: Look) -> None:
    model = wrapped("Mixtral")
    model.set_experts_implementation(implementation)
    finding = finding_of("MOD012", look(model))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.kind == "python"
    exec(finding.treatment.code, {"model": model})
    facts = look(model)
    assert outcome_of("MOD012", facts).outcome == "healthy"
    assert sum(linear.use == "training" for linear in facts.network.linears) == 2


def test_torchao_multiplies_experts_in_fp8_only_by_the_grouped_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check says of the library is what the library does."""
    import torchao.prototype.moe_training.tensor as tensor

    reached = []

    def product(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor, config: object) -> torch.Tensor:
        reached.append(weight.shape)
        return torch._grouped_mm(x, weight, offs=offs)

    monkeypatch.setattr(tensor, "_quantize_then_scaled_grouped_mm", product)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **small)).bfloat16()
    quantize_(
        model,
        Float8TrainingOpConfig(),
        filter_fn=lambda module, _: type(module).__name__.endswith("Experts"),
    )
    counts = []
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        model.set_experts_implementation(implementation)
        reached.clear()
        model(torch.zeros(1, 32, dtype=torch.long))
        counts.append(len(reached))
    assert counts == [2, 0, 0]


def test_small_experts_beside_attention_in_fp8_are_told(look: Look) -> None:
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(made("Qwen3"), module_filter_fn=lambda module, name: "attn" in name)
    facts = look(model)
    finding = finding_of("MOD012", facts)
    assert finding is not None
    assert (finding.severity, finding.evidence["ceiling"]) == ("info", 1.1)
    assert finding.treatment is None
    assert outcome_of("MOD004", facts).outcome == "healthy"


@pytest.mark.parametrize("vocabulary", [1024, 151936])
def test_where_little_is_left_beside_small_experts_fp8_is_to_be_left_off(vocabulary: int, look: Look) -> None:
    """Whatever the head is: by good custom it is left out."""
    from torchao.float8 import convert_to_float8_training

    config = Qwen3MoeConfig(num_hidden_layers=1, vocab_size=vocabulary)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "attn" in name)
    finding = finding_of("MOD012", look(model, tokens=4096))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title.startswith("Experts hold 80% of the matmul FLOPs that FP8 could take")
    assert "estimated for H100" in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.name == "stay-in-bf16"


@pytest.mark.parametrize("name", MODELS)
def test_untouched_experts_are_not_told(name: str, look: Look) -> None:
    assert outcome_of("MOD012", look(made(name))).outcome == "not_applicable"
