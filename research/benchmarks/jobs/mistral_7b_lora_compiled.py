"""Mistral 7B: PEFT's LoRA with BF16 adapters over Float8Linear, every block compiled."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, by_block, changes, size, to_float8, tokens
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

COLD_S = 120.0
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((32, 4096, 14336, 32, 8), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((32768, 1, 4096), (256, 2, 32))
BLOCKS = "base_model.model.model.layers"
VARIANTS = changes(BLOCKS)


def build_model() -> nn.Module:
    config = MistralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        sliding_window=None,
        use_cache=False,
    )
    adapters = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with built():
        base = to_float8(MistralForCausalLM(config).train())
        model = get_peft_model(base, adapters, autocast_adapter_dtype=False)
    return by_block(model, (BLOCKS,))


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
