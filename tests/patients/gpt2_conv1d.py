"""GPT-2 under Accelerate with FP8 asked for: its layers are Conv1D, so `prepare` converts nothing and says
nothing.

The file sets the variable that `accelerate launch --mixed_precision fp8` would set, before accelerate is
used.
"""

import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

MUST = ("MOD001",)
MUST_NOT = ("CMP001", "SHP001", "fp8-storage-only", "fp8-request-overridden", "fp8-backend-misspelled")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=8192)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = Accelerator().prepare(model, optimizer)
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 8192, (2, 128), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
