"""The 1B-shaped LlamaForCausalLM in float8, compiled block by block, loaded with attn_implementation="eager"
to look at its attention once."""

import llama_gqa
import torch
from llama_gqa import example_batch

__all__ = ["build_model", "example_batch"]

MUST = ("MEM004",)
MUST_NOT = ("CMP001", "CMP002", "CMP003", "CMP005", "MOD001", "cannot-be-saved", "STP004", "SHP001")


def build_model(layers: int = 16) -> torch.nn.Module:
    model = llama_gqa.build_model(layers)
    model.set_attn_implementation("eager")
    for block in model.model.layers:
        block.compile()
    return model
