"""A small Mixtral: attention in FP8, eager. The experts are one 3-D weight, which torchao leaves in BF16."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS, EXPERTS = size((8, 2048, 5632, 16, 4, 8), (2, 64, 128, 4, 2, 4))
VOCABULARY, BATCH, LENGTH = size((32000, 4, 2048), (256, 2, 32))
SKIP = ("lm_head", "gate")
VARIANTS = changes("model.layers", skip=SKIP)


def build_model() -> nn.Module:
    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_local_experts=EXPERTS,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with built():
        model = MixtralForCausalLM(config)
    return to_float8(model.train(), skip=SKIP)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
