"""A Llama 70B that no single GPU holds, timed through ``build_model(layers=N)``: ``fp8doctor
research/benchmarks/llama_70b.py``"""

from __future__ import annotations

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM


def build_model(layers: int = 80) -> nn.Module:
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return convert_to_float8_training(model.train(), module_filter_fn=lambda layer, name: name != "lm_head")


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (1, 2048))
    return {"input_ids": tokens, "labels": tokens}
