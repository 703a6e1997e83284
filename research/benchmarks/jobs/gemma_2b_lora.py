"""Gemma 2B, its head 256,000 wide: PEFT's LoRA with fp32 adapters over Float8Linear, eager."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((18, 2048, 16384, 8, 1, 256), (2, 64, 128, 4, 1, 16))
VOCABULARY, BATCH, LENGTH = size((256000, 2, 1024), (256, 2, 32))
VARIANTS = changes("base_model.model.model.layers")


def build_model() -> nn.Module:
    config = GemmaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with built():
        base = to_float8(GemmaForCausalLM(config).train())
        return get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
