"""Qwen3 4B in BF16, eager, its head 151,936 wide and tied to the embedding."""

from __future__ import annotations

import torch
from plain import built, changes, size, tokens
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((36, 2560, 9728, 32, 8, 128), (2, 64, 128, 4, 2, 16))
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
        return Qwen3ForCausalLM(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
