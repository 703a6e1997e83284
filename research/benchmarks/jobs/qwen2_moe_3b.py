"""A Qwen2-MoE of 3B with shared experts: attention in FP8, eager."""

from __future__ import annotations

import torch
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

LAYERS, WIDTH, INNER, SHARED, HEADS = size((12, 2048, 1408, 5632, 16), (2, 64, 32, 64, 4))
EXPERTS, CHOSEN, VOCABULARY, BATCH, LENGTH = size((16, 4, 151936, 2, 2048), (4, 2, 256, 2, 32))
SKIP = ("lm_head", "mlp")
VARIANTS = changes("model.layers", skip=SKIP)


def build_model() -> nn.Module:
    config = Qwen2MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=SHARED,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with built():
        model = Qwen2MoeForCausalLM(config)
    return to_float8(model.train(), skip=SKIP)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
