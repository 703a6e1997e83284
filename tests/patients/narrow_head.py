"""A classifier on a Llama, converted without a filter: its 16 classes are a multiple of 16, so the head is
converted too."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForSequenceClassification

MUST = ("SHP002",)
MUST_NOT = ("MOD001", "MOD003", "MOD004", "SHP001", "SHP003", "CMP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 4) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        num_labels=16,
        pad_token_id=0,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = LlamaForSequenceClassification(config).bfloat16()
    convert_to_float8_training(model)
    for layer in model.model.layers:
        layer.compile()
    model.score.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 32000, (16, 1024), device=DEVICE)
    return {"input_ids": tokens, "labels": torch.randint(0, 16, (16,), device=DEVICE)}
