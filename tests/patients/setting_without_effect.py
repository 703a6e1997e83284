"""FP8_BACKEND=TE in the environment, as some training frameworks export it: nothing reads that name, and
torchao is taken."""

import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
os.environ["FP8_BACKEND"] = "TE"

import torch
from accelerate import Accelerator
from env_overridden import example_batch, small_llama

__all__ = ["build_model", "example_batch"]

MUST = ("fp8-setting-without-effect", "CMP001")
MUST_NOT = (
    "MOD001",
    "fp8-storage-only",
    "fp8-request-overridden",
    "fp8-backend-misspelled",
    "SHP001",
    "CMP002",
)


def build_model(layers: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = small_llama(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = Accelerator().prepare(model, optimizer)
    return model, optimizer
