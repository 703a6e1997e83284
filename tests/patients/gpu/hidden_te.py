"""The BF16 baseline of an FP8 run, made in the same shell: ACCELERATE_FP8_BACKEND=TE is still set, and FP8
runs."""

from __future__ import annotations

import os

os.environ["ACCELERATE_FP8_BACKEND"] = "TE"

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("hidden-fp8",)
MUST_NOT = (
    "MOD001",
    "CMP001",
    "fp8-request-overridden",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
    "fp8-backend-missing",
)


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
    model, optimizer = Accelerator(mixed_precision="bf16").prepare(model, optimizer)
    tokens = torch.randint(0, 32000, (4, 512), device="cuda")
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    return model, optimizer
