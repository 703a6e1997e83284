"""Qwen2.5 3B: PEFT's LoRA over Float8Linear, gradient checkpointing, eager."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from plain import built, changes, size, to_float8, tokens
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

LAYERS, WIDTH, INNER, HEADS, GROUPS = size((36, 2048, 11008, 16, 2), (2, 64, 128, 4, 2))
VOCABULARY, BATCH, LENGTH = size((151936, 4, 1024), (256, 2, 32))
VARIANTS = changes("base_model.model.model.layers")


def build_model() -> nn.Module:
    config = Qwen2Config(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with built():
        base = to_float8(Qwen2ForCausalLM(config).train())
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
        lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(base, lora, autocast_adapter_dtype=False)


def example_batch() -> dict[str, torch.Tensor]:
    return tokens(VOCABULARY, BATCH, LENGTH)
