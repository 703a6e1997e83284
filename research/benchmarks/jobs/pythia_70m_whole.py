"""A GPT-NeoX of 70M, in FP8 under ``torch.compile(model)``: too narrow for FP8 to win."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

COLD_S = 120.0
LAYERS, WIDTH, INNER, HEADS = size((6, 512, 2048, 8), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((50304, 8, 2048), (256, 2, 32))
SKIP = ("embed_out", "lm_head")
"""The head, by its names in older and newer transformers."""
VARIANTS = changes("gpt_neox.layers", skip=SKIP, as_compiled=True)


def build_model() -> nn.Module:
    config = GPTNeoXConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with built():
        model = GPTNeoXForCausalLM(config)
    return torch.compile(to_float8(model.train(), skip=SKIP))


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
