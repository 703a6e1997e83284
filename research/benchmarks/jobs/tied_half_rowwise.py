"""A Llama 4096 wide with tied embeddings; the filter converts the MLPs alone, rowwise, compiled by block."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS = size((4, 4096, 14336, 32, 32), (2, 64, 128, 4, 4))
VOCABULARY, BATCH, LENGTH = size((32000, 4, 2048), (256, 2, 32))
SKIP = ("lm_head", "self_attn")
VARIANTS = changes("model.layers", skip=SKIP)


def build_model() -> nn.Module:
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with built():
        model = to_float8(LlamaForCausalLM(config).train(), "rowwise", skip=SKIP)
    for block in model.model.layers:
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
