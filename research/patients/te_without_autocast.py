"""The blocks of te_autocast with the autocast switched off: te.Linear everywhere, and not one FP8 GEMM."""

from __future__ import annotations

import torch
from te_autocast import Model, example_batch, loss, trained_once

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("MOD002",)
MUST_NOT = ("MOD001", "CMP001")


def build_model() -> torch.nn.Module:
    return trained_once(Model(fp8=False).cuda())
