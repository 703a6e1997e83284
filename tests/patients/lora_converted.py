"""LoRA first, FP8 second: the converter takes the adapters, rank 16, for ordinary Linears."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("adapters-converted",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP001", "CMP002", "fp32-parameters")

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
        model = get_peft_model(
            LlamaForCausalLM(config).bfloat16(),
            LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("lm_head"))
    for layer in model.base_model.model.model.layers:
        layer.compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (4, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
