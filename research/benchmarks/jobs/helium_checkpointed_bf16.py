"""Helium 2B's width, cut at 10 layers: a decoder in BF16 with gradient checkpointing and torch's AdamW as it
comes, eager, on a GPU that is mostly free: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import adamw, built, changes, size, tokens
from torch import nn
from transformers import HeliumConfig, HeliumForCausalLM

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, HEAD = size((10, 2560, 7040, 20, 128), (3, 64, 128, 4, 16))
VOCABULARY, BATCH, LENGTH = size((48000, 4, 4096), (256, 2, 32))
VARIANTS = changes("model.layers")
build_optimizer = adamw


def build_model() -> nn.Module:
    config = HeliumConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    with built():
        model = HeliumForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
