"""Gemma-2 2B with transformers' eager attention, as its makers advise for training; every block compiled."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((26, 2304, 9216, 8, 4, 256), (2, 64, 128, 4, 2, 16))
VOCABULARY, BATCH, LENGTH = size((256000, 1, 2048), (256, 2, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = Gemma2Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        query_pre_attn_scalar=HEAD,
        vocab_size=VOCABULARY,
        attn_implementation="eager",
        use_cache=False,
    )
    with built():
        model = to_float8(Gemma2ForCausalLM(config).train())
    for block in model.model.layers:
        block.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
