"""LoRA first, Accelerate's Transformer Engine second: the adapters are converted too, and the frozen base is
no longer frozen."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("adapters-converted", "MOD007")
MUST_NOT = ("MOD001", "MOD002", "CMP001", "SHP001", "ENV001", "ENV003")


def build_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("cuda"):
        base = LlamaForCausalLM(config).bfloat16()
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), fused=True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")])
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()(**example_batch()).loss.backward()
    model.zero_grad()
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (4, 2048), device="cuda")
    return {"input_ids": tokens, "labels": tokens}
