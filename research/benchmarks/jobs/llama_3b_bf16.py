"""Llama 3.2 3B in BF16, eager: nothing is in FP8, and the trial says what converting it would give."""

from __future__ import annotations

import torch
from plain import built, changes, size, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS = size((28, 3072, 8192, 24, 8), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((128256, 2, 2048), (256, 2, 32))
VARIANTS = changes("model.layers")


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
        return LlamaForCausalLM(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
