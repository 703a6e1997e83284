"""Llama layers of 8B widths that Accelerate converted to Transformer Engine, with the 8,192 tokens that FP8
needs to pay: it does, and keeps FP8 copies of the weights beside them."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("MEM001",)
MUST_NOT = ("MOD001", "MOD002", "MOD007", "CMP001", "SHP001", "ENV001", "fp8-backend-misspelled")


def build_model(layers: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")])
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()(**example_batch()).loss.backward()
    model.zero_grad()
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (4, 2048), device="cuda")
    return {"input_ids": tokens, "labels": tokens}
