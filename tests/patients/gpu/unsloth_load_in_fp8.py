"""Unsloth's LoRA over a base that `load_in_fp8=True` stores in FP8: the forward GEMMs run in FP8, the
backward's in BF16."""

from __future__ import annotations

import torch
from unsloth_lora import adapted, example_batch, loaded, train

__all__ = ["build_model", "example_batch"]

MUST = ("MOD003",)
MUST_NOT = ("MOD001", "adapters-converted", "CMP001", "CMP002", "SHP001")


def build_model() -> torch.nn.Module:
    return adapted(loaded(load_in_fp8=True, use_gradient_checkpointing=False))


if __name__ == "__main__":
    train(build_model())
