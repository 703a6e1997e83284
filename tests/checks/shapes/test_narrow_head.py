"""SHP004 on real heads and routers that a conversion without a filter takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    ViTConfig,
    ViTForImageClassification,
)

from fp8doctor.facts import Facts
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]
TOKENS = 8192
SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


class Routed(nn.Module):
    """Two layers of experts, each with a router that is a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"router": nn.Linear(2048, 64, bias=False), "experts": nn.ModuleList()})
            for _ in range(2)
        )
        self.up = nn.Linear(2048, 8192)


def classifier(classes: int = 16) -> nn.Module:
    return LlamaForSequenceClassification(
        LlamaConfig(**SIZES, num_labels=classes, use_cache=False)
    ).bfloat16()


def vision(classes: int = 16) -> nn.Module:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return ViTForImageClassification(ViTConfig(**sizes, num_labels=classes)).bfloat16()


def causal() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=32000, use_cache=False)).bfloat16()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def converted(make: Callable[[], nn.Module]) -> nn.Module:
    return convert_to_float8_training(
        on_meta(make), module_filter_fn=lambda layer, name: layer.out_features % 16 == 0
    )


@pytest.mark.parametrize(
    ("make", "head"), [(classifier, "score"), (vision, "classifier")], ids=["text", "images"]
)
def test_a_narrow_head_is_blamed_by_name_and_the_filter_leaves_it(
    make: Callable[[], nn.Module], head: str, look: Look
) -> None:
    finding = finding_of("SHP004", look(converted(make), tokens=TOKENS))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == f"1 head in FP8 (2048 to 16 features) is slower than in BF16: {head}"
    assert finding.treatment is not None
    assert finding.treatment.layers == (head,)
    scope: dict[str, Any] = {"model": on_meta(make), "convert_to_float8_training": convert_to_float8_training}
    exec(finding.treatment.code, scope)
    facts = look(scope["model"], tokens=TOKENS)
    assert outcome_of("SHP004", facts).outcome == "not_applicable"
    assert sum(linear.use == "training" for linear in facts.network.linears) == len(facts.network.linears) - 1


def test_routers_are_blamed(look: Look) -> None:
    finding = finding_of("SHP004", look(converted(lambda: Routed().bfloat16()), tokens=TOKENS))
    assert finding is not None
    assert finding.title == "2 routers in FP8 (2048 to 64 features) are slower than in BF16: layers.0.router"
    assert finding.explanation.endswith("goes straight into the choice of the experts.")
    assert finding.treatment is not None
    assert finding.treatment.code.splitlines()[1] == 'keep = {f"layers.{i}.router" for i in range(2)}'


@pytest.mark.parametrize("tokens", [TOKENS, 512], ids=["many tokens", "few tokens"])
def test_a_head_as_wide_as_a_vocabulary_is_told_without_a_warning(tokens: int, look: Look) -> None:
    finding = finding_of("SHP004", look(converted(causal), tokens=tokens))
    assert finding is not None
    assert finding.severity == "info"
    assert finding.saving_ms is None
    assert finding.treatment is not None
    keep = finding.treatment.layers
    assert keep == ("lm_head",)
    mended = convert_to_float8_training(
        on_meta(causal), module_filter_fn=lambda layer, name: name not in keep
    )
    assert outcome_of("SHP004", look(mended, tokens=tokens)).outcome == "not_applicable"


@pytest.mark.parametrize(
    "make",
    [
        lambda: classifier(3),
        lambda: AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4)),
    ],
)
def test_heads_and_routers_that_were_left_alone_are_no_matter(
    make: Callable[[], nn.Module], look: Look
) -> None:
    model = on_meta(make)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda layer, name: (
            layer.out_features % 16 == 0 and "head" not in name and "gate" not in name
        ),
    )
    assert outcome_of("SHP004", look(model, tokens=TOKENS)).outcome == "not_applicable"


def test_without_a_batch_there_is_no_answer_to_be_had(look: Look) -> None:
    assert outcome_of("SHP004", look(converted(classifier))).outcome == "not_applicable"
