"""Phi-3 mini cut at 3B, its q, k, v and its gate and up in one Linear each: PEFT's LoRA with fp32 adapters
over Float8Linear, gradient checkpointing, eager."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS = size((25, 3072, 8192, 32), (2, 64, 128, 4))
VOCABULARY, BATCH, LENGTH = size((32064, 2, 2048), (256, 2, 32))
VARIANTS = changes("base_model.model.model.layers")


def build_model() -> nn.Module:
    config = Phi3Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    lora = LoraConfig(r=32, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    with built():
        base = to_float8(Phi3ForCausalLM(config).train())
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
        return get_peft_model(base, lora)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
