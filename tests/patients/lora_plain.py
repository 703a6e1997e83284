"""Ordinary BF16 LoRA: nobody asked for FP8 and nothing has it. Nothing to complain about."""

import torch
from lora import ADAPTERS, DEVICE, example_batch, llama_1b
from peft import get_peft_model

__all__ = ["build_model", "example_batch"]

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP001", "CMP002")
SILENT = True


def build_model(layers: int = 16) -> torch.nn.Module:
    with torch.device(DEVICE):
        return get_peft_model(llama_1b(layers), ADAPTERS, autocast_adapter_dtype=False)
