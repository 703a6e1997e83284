"""A small Llama that Accelerate converted to Transformer Engine, model and optimizer prepared together."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from transformers import LlamaConfig, LlamaForCausalLM

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "CMP001", "ENV001", "fp8-backend-misspelled")
SILENT = True


def build_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")])
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(0, 32000, (4, 512), device="cuda")
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    return model, optimizer
