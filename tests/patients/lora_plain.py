"""Ordinary BF16 LoRA: nobody asked for FP8 and nothing has it. Nothing to complain about."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP001", "CMP002")
SILENT = True

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
        base = LlamaForCausalLM(config).bfloat16()
        return get_peft_model(
            base,
            LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            autocast_adapter_dtype=False,
        )


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128256, (4, 2048), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
