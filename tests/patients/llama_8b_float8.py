"""Llama 3 8B in full, every Linear but the head in FP8 and none compiled: 0.4x of BF16, and the cut has to
say so."""

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002", "ENV001", "fp8-backend-misspelled")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 32) -> nn.Module:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return convert_to_float8_training(model.train(), module_filter_fn=lambda layer, name: name != "lm_head")


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (2, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
