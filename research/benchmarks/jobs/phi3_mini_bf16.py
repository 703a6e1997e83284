"""Phi-3 mini in BF16, eager, with transformers' default of building a KV cache in training."""

from __future__ import annotations

import torch
from plain import built, changes, size, tokens
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

LAYERS, WIDTH, INNER, HEADS = size((32, 3072, 8192, 32), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((32064, 1, 2048), (256, 2, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = Phi3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with built():
        return Phi3ForCausalLM(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
