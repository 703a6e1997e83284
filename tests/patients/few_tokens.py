"""A 1B-shaped Llama, compiled, whose micro-batch is one sequence of 256 tokens; it accumulates 32 of them."""

from __future__ import annotations

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("SHP003",)
MUST_NOT = ("MOD001", "MOD003", "MOD004", "SHP001", "SHP002", "SHP004", "CMP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"

accumulate = 32


def build_model(layers: int = 8) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    for layer in model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (1, 256), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
