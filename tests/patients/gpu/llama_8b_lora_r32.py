"""The Llama 3 8B of llama_8b_lora_r8 with adapters of rank 32."""

from __future__ import annotations

import torch
from llama_8b_lora_r8 import adapted, example_batch

__all__ = ["build_model", "example_batch"]

MUST = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "adapters-converted")


def build_model(layers: int = 32) -> torch.nn.Module:
    return adapted(32, layers)
