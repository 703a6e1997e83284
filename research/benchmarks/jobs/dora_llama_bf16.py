"""PEFT's DoRA on the Linears of a Llama 3,072 wide, cut at 8 layers, its adapters in BF16. BF16, eager: what
would FP8 give?"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, changes, size, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((8, 3072, 8192, 24, 8), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((32000, 4, 2048), (256, 2, 32))
VARIANTS = changes("base_model.model.model.layers", skip=("lm_head", "lora_"))


def build_model() -> nn.Module:
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=True)
    with built():
        base = LlamaForCausalLM(config).train()
        return get_peft_model(base, adapters, autocast_adapter_dtype=False)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
