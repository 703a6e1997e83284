"""SHP002 on real converted models: which layers are named, that the printed filter leaves them out, and when
nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Facts, LayerShape, Trial
from fp8doctor.finding import Finding
from tests.checks.arms import ran
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]
TOKENS = 16384
KV = ("k_proj", "v_proj")


def llama(kv_heads: int = 1, width: int = 2048, hidden: int = 2048, layers: int = 3) -> nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=kv_heads,
        vocab_size=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def float8(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda layer, name: "head" not in name
    )


def found(facts: Facts) -> Finding:
    finding = finding_of("SHP002", facts)
    assert finding is not None
    assert finding.treatment is not None
    assert finding.saving_ms is not None
    return finding


def test_narrow_keys_and_values_are_named(look: Look) -> None:
    finding = found(look(float8(llama()), tokens=TOKENS))
    assert finding.severity == "warning"
    assert (
        finding.title
        == "6 FP8 layers of 21 (in x out 2048 x 64) are slower than BF16, compiled too (estimated)"
    )
    assert finding.explanation.startswith("Modelled on H100: ")
    assert finding.treatment is not None
    assert set(finding.treatment.layers) == {
        f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in KV
    }
    assert (finding.evidence["losing_layers"], finding.evidence["timed_alone"]) == (6, False)
    assert finding.saving_ms is not None
    assert finding.saving_ms.basis == "modelled"
    assert finding.saving_ms.low > 0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_printed_filter_makes_it_silent_and_leaves_what_was_left(recipe: str, look: Look) -> None:
    finding = found(look(float8(llama(), recipe), tokens=TOKENS))
    assert finding.treatment is not None
    scope: dict[str, Any] = {
        "model": llama(),
        "convert_to_float8_training": convert_to_float8_training,
        "Float8LinearConfig": Float8LinearConfig,
    }
    exec(finding.treatment.code, scope)
    facts = look(scope["model"], tokens=TOKENS)
    assert outcome_of("SHP002", facts).outcome == "healthy"
    converted = {linear.name: linear.recipe for linear in facts.network.linears if linear.use == "training"}
    assert len(converted) == 15
    assert set(converted.values()) == {recipe}
    assert "lm_head" not in converted


def test_layers_of_transformer_engine_are_built_anew(look: Look) -> None:
    network = look(float8(llama()), tokens=TOKENS).network
    te = tuple(
        msgspec.structs.replace(each, stack="transformer_engine", recipe="delayed")
        for each in network.linears
    )
    treatment = keep_in_bf16((te[1].name,), Facts(network=msgspec.structs.replace(network, linears=te)))
    assert (
        treatment.code
        == 'keep = {"model.layers.0.self_attn.k_proj"}\n# build these as torch.nn.Linear, not as te.Linear'
    )


@pytest.mark.parametrize(
    ("kv_heads", "width", "hidden"),
    [(8, 2048, 8192), (16, 1024, 4096), (16, 4096, 14336)],
    ids=["the widths of a 1B", "of a 468M", "of an 8B"],
)
def test_ordinary_decoders_are_healthy(kv_heads: int, width: int, hidden: int, look: Look) -> None:
    assert (
        outcome_of("SHP002", look(float8(llama(kv_heads, width, hidden)), tokens=TOKENS)).outcome == "healthy"
    )


def test_the_frozen_layers_of_a_lora_have_too_few_tokens_and_not_too_small_a_shape(look: Look) -> None:
    model = get_peft_model(llama(8, 4096, 14336), LoraConfig(r=16, target_modules="all-linear"))
    convert_to_float8_training(
        model, module_filter_fn=lambda layer, name: "lora" not in name and "head" not in name
    )
    facts = look(model, tokens=2048)
    assert {linear.requires_grad for linear in facts.network.linears if linear.use == "training"} == {False}
    assert outcome_of("SHP002", facts).outcome == "healthy"


def test_where_every_layer_loses_bf16_is_the_treatment(look: Look) -> None:
    finding = found(look(float8(llama(4, 256, 1024)), tokens=TOKENS))
    assert finding.treatment is not None
    assert finding.treatment.name == "stay-in-bf16"
    assert finding.evidence["losing_layers"] == finding.evidence["fp8_layers"] == 21


@pytest.mark.parametrize(
    ("make", "tokens", "reason"),
    [
        (lambda: llama(), TOKENS, "no FP8 layer"),
        (lambda: float8(llama()), None, "no FP8 layer with known"),
        (lambda: float8(llama(8)), 256, "SHP003"),
    ],
    ids=["BF16", "no batch", "few tokens"],
)
def test_when_the_question_does_not_arise(
    make: Callable[[], nn.Module], tokens: int | None, reason: str, look: Look
) -> None:
    outcome = outcome_of("SHP002", look(make(), tokens=tokens))
    assert outcome.outcome == "not_applicable"
    assert reason in (outcome.reason or "")


def test_the_matrices_of_lora_are_left_to_its_own_check(look: Look) -> None:
    model = get_peft_model(llama(32), LoraConfig(r=16, target_modules="all-linear"))
    facts = look(
        convert_to_float8_training(model, module_filter_fn=lambda layer, name: "lora" in name), tokens=TOKENS
    )
    assert outcome_of("LORA003", facts).outcome == "sick"
    assert outcome_of("SHP002", facts).outcome == "healthy"


def timed(facts: Facts, *losing: str, kept_ms: float = 97.0) -> Facts:
    """The facts with every layer's shape as a GPU may have timed it, these lose, the others gain; and the
    step without them."""
    shapes = tuple(
        LayerShape(
            m=TOKENS,
            k=each.in_features,
            n=each.out_features,
            recipe="tensorwise",
            trained=True,
            layers=(each.name,),
            bf16_ms=0.13,
            fp8_ms=0.12 if each.name.endswith(losing) else 0.05,
            casts_ms=0.06,
            reason=None,
        )
        for each in facts.network.linears
        if each.use == "training"
    )
    arms = (ran("as_is", 100.0), ran("keep-in-bf16", kept_ms, base="as_is", treatments=("keep-in-bf16",)))
    return msgspec.structs.replace(
        facts,
        trial=Trial(device="cuda", gpu="NVIDIA H200", shapes=shapes, arms=arms, reliable=True, reason=None),
    )


def test_what_was_timed_alone_has_the_word(look: Look) -> None:
    finding = found(timed(look(float8(llama(8, 1024)), tokens=TOKENS), "q_proj", "o_proj"))
    assert finding.explanation.startswith(
        "Timed alone on NVIDIA H200: their matmuls take 0.78 ms/step in BF16 and 0.72 ms in FP8"
    )
    assert finding.evidence["timed_alone"] is True
    assert finding.treatment is not None
    assert set(finding.treatment.layers) == {
        f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in ("q_proj", "o_proj")
    }


@pytest.mark.parametrize(
    ("kept_ms", "outcome"),
    [(99.8, "sick"), (99.95, "healthy"), (100.5, "refuted")],
    ids=["gains", "too little", "costs"],
)
def test_what_the_whole_step_gained_without_them_has_the_last_word(
    kept_ms: float, outcome: str, look: Look
) -> None:
    """Six layers that lose 0.017 ms each at the least."""
    facts = timed(look(float8(llama(8, 1024)), tokens=TOKENS), "q_proj", "o_proj", kept_ms=kept_ms)
    found = diagnose(facts)
    assert {each.code: each.outcome for each in found.outcomes}["SHP002"] == outcome
    told = [each.explanation for each in found.findings if each.code == "SHP002"]
    saved = f"{100 - kept_ms:.2f}".replace("-", "−")
    assert [
        each.endswith(f" The whole step was timed without them in FP8: that saves {saved} to {saved} ms.")
        for each in told
    ] == ([] if outcome == "healthy" else [True])


def test_timed_layers_that_gain_acquit_what_the_model_accused(look: Look) -> None:
    facts = look(float8(llama()), tokens=TOKENS)
    assert outcome_of("SHP002", facts).outcome == "sick"
    assert outcome_of("SHP002", timed(facts, "nothing")).outcome == "healthy"


def test_beside_a_layer_that_no_gpu_runs_bf16_is_the_treatment_too(look: Look) -> None:
    """A reward model's score of one number: all layers were to be left out, and what was left compiled."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 1)).bfloat16()
    finding = found(look(convert_to_float8_training(model), tokens=TOKENS))
    assert finding.treatment is not None
    assert finding.treatment.name == "stay-in-bf16"
