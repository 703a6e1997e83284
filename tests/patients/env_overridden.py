"""The launcher asked for FP8, and the script says `Accelerator(mixed_precision="bf16")`: the argument wins,
in silence.

The file sets the variable that `accelerate launch --mixed_precision fp8` would set, before accelerate is
used.
"""

import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("ENV001",)
MUST_NOT = ("CMP001", "CMP002", "MOD003", "fp8-backend-misspelled")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_llama(layers: int) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build_model(layers: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = small_llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = Accelerator(mixed_precision="bf16").prepare(model, optimizer)
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8192, (2, 128), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
