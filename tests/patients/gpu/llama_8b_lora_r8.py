"""LoRA of rank 8 on a Llama 3 8B whose base is in FP8 and compiled block by block: what do the adapters
cost?"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import llama_8b_float8
import torch
from llama_8b_float8 import example_batch
from peft import LoraConfig, get_peft_model

__all__ = ["adapted", "build_model", "example_batch"]

MUST = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "adapters-converted")


def adapted(rank: int, layers: int) -> torch.nn.Module:
    """The base converted first, then BF16 adapters on all its projections, then compiled."""
    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(llama_8b_float8.build_model(layers), config, autocast_adapter_dtype=False)
    for layer in model.base_model.model.model.layers:
        layer.compile()
    return model


def build_model(layers: int = 32) -> torch.nn.Module:
    return adapted(8, layers)
