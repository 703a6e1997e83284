"""Qwen3 1.7B, converted rowwise and compiled in place as a whole."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

COLD_S = 120.0
LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((28, 2048, 6144, 16, 8, 128), (2, 64, 128, 4, 2, 16))
VOCABULARY, BATCH, LENGTH = size((151936, 2, 2048), (256, 2, 32))
VARIANTS = changes("model.layers", as_compiled=True)


def build_model() -> nn.Module:
    config = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with built():
        model = Qwen3ForCausalLM(config)
    model = to_float8(model.train(), "rowwise")
    model.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
