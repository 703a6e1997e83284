"""A 1B-shaped LlamaForCausalLM with 8 key/value heads, converted by torchao and never compiled."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 16) -> torch.nn.Module:
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
    return convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (4, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
