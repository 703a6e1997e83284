"""Multi-query attention in FP8: one head of keys and values, so that their projections have 64 columns;
compiled."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("SHP002",)
MUST_NOT = ("MOD001", "MOD003", "MOD004", "SHP001", "SHP003", "CMP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 8) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=1,
        vocab_size=32000,
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
    tokens = torch.randint(0, 32000, (8, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
