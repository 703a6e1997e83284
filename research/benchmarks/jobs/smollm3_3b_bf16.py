"""SmolLM3 3B's width, cut at 12 layers, of which every fourth has no rotary positions; its head is tied.
4,096 tokens, BF16, eager: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import built, changes, size, tokens
from torch import nn
from transformers import SmolLM3Config, SmolLM3ForCausalLM

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((12, 2048, 11008, 16, 4), (4, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((128256, 2, 4096), (256, 2, 32))
VARIANTS = changes("model.layers")


def build_model() -> nn.Module:
    config = SmolLM3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with built():
        return SmolLM3ForCausalLM(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
