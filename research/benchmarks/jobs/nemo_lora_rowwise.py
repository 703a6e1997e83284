"""Mistral Nemo's width, cut at 6 layers: PEFT's LoRA on every projection, adapters in fp32 as PEFT makes
them; the base in rowwise FP8, converted after PEFT with a filter. Every block compiled by the user."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, by_block, changes, size, to_float8, tokens
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

RECIPE = "rowwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD = size((6, 5120, 14336, 32, 8, 128), (3, 64, 128, 4, 2, 16))
VOCABULARY, BATCH, LENGTH = size((131072, 2, 4096), (256, 2, 32))
LISTS = ("base_model.model.model.layers",)
SKIP = ("lm_head", "lora_")
VARIANTS = changes(*LISTS, skip=SKIP)


def build_model() -> nn.Module:
    config = MistralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        sliding_window=None,
        use_cache=False,
    )
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=32, lora_alpha=64, target_modules=layers, task_type="CAUSAL_LM")
    with built():
        model = get_peft_model(MistralForCausalLM(config).train(), lora)
    return by_block(to_float8(model, "rowwise", skip=SKIP), LISTS)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
