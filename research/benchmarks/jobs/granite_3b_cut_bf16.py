"""Granite, 3,072 wide and cut at 10 layers, in BF16: every block compiled by the user."""

from __future__ import annotations

import torch
from plain import built, changes, size, tokens
from torch import nn
from transformers import GraniteConfig, GraniteForCausalLM

RECIPE = None
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((10, 3072, 8192, 24, 8), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((49152, 2, 2048), (256, 2, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = GraniteConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        attention_multiplier=HEADS / WIDTH,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with built():
        model = GraniteForCausalLM(config).train()
    for block in model.model.layers:
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
