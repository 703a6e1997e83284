"""Qwen3-30B-A3B at full size in plain BF16: 128 experts as 3-D weights, a router with narrow outputs, no FP8
asked for."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

MUST: tuple[str, ...] = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001")
SILENT = True

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 48) -> torch.nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 151936, (1, 4096), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
