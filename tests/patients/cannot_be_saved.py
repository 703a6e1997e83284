"""A Llama that Accelerate's torchao path converted and that is compiled block by block: it trains, and no
checkpoint can be written.

The optimizer is made after the conversion, so that it holds the wrapped weights. ``save_pretrained`` and a
Trainer stop with "Attempted to access the data pointer on an invalid python storage".
"""

import os

os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
os.environ["ACCELERATE_FP8_BACKEND"] = "AO"

import accelerate_eager
import torch
from accelerate_eager import example_batch

__all__ = ["build_model", "example_batch"]

MUST = ("cannot-be-saved",)
MUST_NOT = (
    "CMP001",
    "CMP002",
    "MOD001",
    "fp8-storage-only",
    "parameters-without-optimizer",
    "MEM004",
    "SHP001",
)


def build_model(layers: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = accelerate_eager.build_model(layers)
    for block in model.model.layers:
        block.compile()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)
