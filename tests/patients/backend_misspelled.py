"""`accelerate launch --mixed_precision fp8 --fp8_backend te` writes the backend in lower case, which
Accelerator() refuses.

The file sets what the launcher would set, and stops before the Accelerator that would raise.
"""

import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
os.environ["ACCELERATE_FP8_BACKEND"] = "te"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("fp8-backend-misspelled",)
MUST_NOT = ("CMP001", "CMP002", "MOD003", "SHP001")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model(layers: int = 2) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8192, (2, 128), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
