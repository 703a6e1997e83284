"""Qwen3 8B's width, cut at 8 layers: PEFT's LoRA on queries and values, adapters in fp32 as PEFT makes them;
the base in rowwise FP8, converted after PEFT with a filter. Every block compiled by the user."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, by_block, changes, size, to_float8, tokens
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

RECIPE = "rowwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((8, 4096, 12288, 32, 8, 128), (2, 64, 128, 4, 2, 16))
VOCABULARY, BATCH, LENGTH = size((151936, 4, 2048), (256, 2, 32))
LISTS = ("base_model.model.model.layers",)
SKIP = ("lm_head", "lora_")
VARIANTS = changes(*LISTS, skip=SKIP)


def build_model() -> nn.Module:
    config = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with built():
        model = get_peft_model(Qwen3ForCausalLM(config).train(), lora)
    return by_block(to_float8(model, "rowwise", skip=SKIP), LISTS)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
