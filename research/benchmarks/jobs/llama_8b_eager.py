"""Llama 3.1 8B, every Linear but the head in FP8, eager.

All of it with AdamW in BF16 are 60 GiB: an H100 has room for 1,024 tokens beside them, an H200 for more.
"""

from __future__ import annotations

import torch
from plain import built, changes, gpu_gib, size, to_float8, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

COLD_S = 120.0
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((32, 4096, 14336, 32, 8), (2, 64, 128, 4, 2))
VOCABULARY, SHORT, LONG = size((128256, 1024, 4096), (256, 32, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with built():
        model = LlamaForCausalLM(config)
    return to_float8(model.train())


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, 1, LONG if gpu_gib() > 100 else SHORT)
