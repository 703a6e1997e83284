"""Qwen3 of the 4B's width, cut at 12 layers: tensorwise FP8, eager, one sequence of 4,096 tokens."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

RECIPE = "tensorwise"
LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((12, 2560, 9728, 32, 8, 128), (2, 64, 128, 4, 2, 16))
VOCABULARY, BATCH, LENGTH = size((151936, 1, 4096), (256, 2, 32))
VARIANTS = changes("model.layers")


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
    return to_float8(model.train())


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
