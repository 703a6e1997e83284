"""Unsloth's full fine-tuning with `float8_training`: torchao's Float8Linears, compiled by Unsloth.

The recipe is given, because ``float8_training=True`` is refused on compute capability 9.0 (2026.10.9).
"""

from __future__ import annotations

import torch
import unsloth_lora
from torchao.float8 import Float8LinearConfig
from unsloth_lora import example_batch, train

__all__ = ["build_model", "example_batch"]

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "MOD003", "CMP002", "SHP001")


def build_model() -> torch.nn.Module:
    recipe = Float8LinearConfig.from_recipe_name("tensorwise")
    return unsloth_lora.loaded(full_finetuning=True, float8_training=recipe, use_gradient_checkpointing=False)


if __name__ == "__main__":
    train(build_model())
