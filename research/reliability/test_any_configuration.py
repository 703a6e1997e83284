"""Whatever a configuration holds, a plan is made or refused in a sentence."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import fp8doctor
from fp8doctor import Plan

KINDS = (*"llama qwen3 mixtral gpt2 gpt_neox gemma2 phi3 bert t5 mamba vit nosuch".split(), "")

sizes = st.sampled_from((0, 1, 16, 48, 64, 128, 256, -8, 7, 2**40))
anything = st.one_of(
    sizes,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=8),
    st.lists(sizes, max_size=2),
    st.just({"a": 1}),
)
KEYS = """
    hidden_size n_embd intermediate_size num_attention_heads num_key_value_heads vocab_size head_dim
    hidden_act max_position_embeddings tie_word_embeddings rope_parameters quantization_config auto_map 
    num_local_experts dtype layer_types
""".split()

configurations = st.builds(
    lambda kind, layers, rest: {"model_type": kind, "num_hidden_layers": layers, "n_layer": layers} | rest,
    st.one_of(st.sampled_from(KINDS), anything),
    st.sampled_from((1, 2, 0, -1, 10**9, "2", None)),
    st.dictionaries(st.sampled_from(KEYS), anything, max_size=6),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "batch": st.sampled_from((1, 8, 0)),
        "seq": st.sampled_from((1, 64, 1000)),
        "dp": st.sampled_from((1, 3, 8)),
        "tp": st.sampled_from((1, 2, 7)),
        "pp": st.sampled_from((1, 2)),
        "lora": st.sampled_from((1, 16)),
        "checkpointing": st.sampled_from(("none", "selective", "full", "half")),
    },
)


def planned(config: dict[str, Any], given_options: dict[str, Any]) -> Plan | str:
    """The plan, or the sentence that refuses it."""
    try:
        return fp8doctor.plan(config, "H100,RTX5090", **given_options)
    except ValueError as error:
        return str(error)


@settings(max_examples=80)
@given(configurations, options)
def test_a_plan_or_a_sentence(config: dict[str, Any], given_options: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    found = planned(config, given_options)
    assert repr(config) == repr(before)
    if isinstance(found, str):
        assert found
        assert "\n" not in found
        return
    for row in found.rows:
        assert row.step_ms is None or row.step_ms > 0
        assert row.bf16_memory_gib is None or row.bf16_memory_gib > 0
    assert all((found.to_text(), found.to_markdown(), found.to_html(), found.to_json()))
