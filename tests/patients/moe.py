"""A small Qwen3-MoE: attention converted by torchao and run eagerly, experts and router left in BF16."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 4) -> torch.nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=4,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    return convert_to_float8_training(model, module_filter_fn=lambda module, name: "self_attn" in name)


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (4, 1024), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
