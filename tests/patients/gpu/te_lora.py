"""LoRA as PEFT makes it, fp32 adapters, over Transformer Engine's layers: the base in FP8, the adapters in
fp32."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from te_autocast import Model, example_batch, loss, trained_once

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("LORA002",)
MUST_NOT = ("adapters-converted", "MOD001", "MOD002", "MOD007", "CMP001", "SHP001")


def build_model() -> torch.nn.Module:
    lora = LoraConfig(r=16, target_modules=["up", "down"])
    return trained_once(get_peft_model(Model(fp8=True).cuda(), lora))
