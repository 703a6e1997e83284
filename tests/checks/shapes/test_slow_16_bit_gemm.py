"""SHP008 on real models, and on a recorded profile of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchao.float8 import convert_to_float8_training
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Facts
from tests.checks.environment.live import finding_of, outcome_of

Look = Callable[..., Facts]
RECORDED = Path(__file__).parents[2] / "patients" / "recorded"
TOKENS = 16384


def llama(vocabulary: int = 50257) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=vocabulary,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def converted(model: PreTrainedModel) -> PreTrainedModel:
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    for layer in model.model.layers:
        layer.compile()
    return model


def test_an_odd_vocabulary_is_found_and_padding_it_makes_it_silent(look: Look) -> None:
    finding = finding_of("SHP008", look(converted(llama()), tokens=TOKENS))
    assert finding is not None
    assert finding.evidence["first"] == "lm_head"
    assert finding.saving_ms is not None
    assert finding.saving_ms.basis == "modelled"
    assert finding.treatment is not None
    assert finding.treatment.code.startswith(
        "model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)"
    )
    padded = llama()
    padded.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)  # no mean on the meta device
    assert padded.lm_head.out_features == 50304
    assert outcome_of("SHP008", look(converted(padded), tokens=TOKENS)).outcome == "healthy"


def test_inductor_pads_what_a_compiled_region_holds(look: Look) -> None:
    model = converted(llama())
    model.lm_head.compile()
    compiled = torch.compile(model)
    assert outcome_of("SHP008", look(compiled, tokens=TOKENS)).outcome == "healthy"


@pytest.mark.parametrize("model", ["GPT2", "Llama"])
def test_a_model_without_fp8_is_not_told(model: str, look: Look) -> None:
    with torch.device("meta"):
        made = GPT2LMHeadModel(GPT2Config(n_layer=2)).bfloat16() if model == "GPT2" else llama()
    assert outcome_of("SHP008", look(made, tokens=TOKENS)).outcome == "not_applicable"


def test_few_padded_columns_of_a_small_step_are_not_worth_it(look: Look) -> None:
    assert outcome_of("SHP008", look(converted(llama(vocabulary=257)), tokens=TOKENS)).outcome == "healthy"


def test_the_profile_decides_where_there_is_one() -> None:
    facts, *_ = read_saved(RECORDED / "h200-decoder_454m.json.gz")
    finding = finding_of("SHP008", facts)
    assert finding is not None
    assert finding.evidence["profiled_16bit_gemms_ms"] == pytest.approx(40.7, abs=0.1)
    assert finding.saving_ms is not None
    assert 30 < finding.saving_ms.middle < 36
    fast = facts.to_dict()
    arm = next(each for each in fast["trial"]["arms"] if each["name"] == "as_is")
    arm["breakdown"]["families_ms"]["gemm_16bit"] = 8.0
    assert outcome_of("SHP008", Facts.from_dict(fast)).outcome == "healthy"
