"""A 1B-shaped LlamaForCausalLM in float8, compiled block by block, whose KV cache was left on: 8 of 16 blocks
run eagerly."""

import llama_gqa
import torch
from llama_gqa import example_batch

__all__ = ["build_model", "example_batch"]

MUST = ("CMP005",)
MUST_NOT = ("CMP001", "CMP002", "CMP003", "MOD001", "SHP001")


def build_model(layers: int = 16) -> torch.nn.Module:
    model = llama_gqa.build_model(layers)
    model.config.use_cache = True
    for block in model.model.layers:
        block.compile()
    return model
