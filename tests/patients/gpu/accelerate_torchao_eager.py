"""FP8 through Accelerate and torchao at 8B widths as the documentation shows it: nothing is compiled."""

from __future__ import annotations

import torch
from accelerate_torchao import accelerated, example_batch

__all__ = ["build_model", "example_batch"]

MUST = ("CMP001",)
MUST_NOT = (
    "CMP002",
    "MOD001",
    "MOD007",
    "ENV001",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
    "SHP001",
)


def build_model(layers: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return accelerated(layers, None)
