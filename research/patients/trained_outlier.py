"""The trained decoder with one massive activation, as large models have them: one feature of block 2 is
131,072 times as large as the others, and the weight that reads it so much smaller. BF16 computes the same as
before; one scale for a whole tensor turns the other features into zeros.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from trained_decoder import example_batch, in_fp8, loss, trained

__all__ = ["build_model", "example_batch", "loss"]

MUST: tuple[str, ...] = ()
MUST_NOT = ("CMP001", "CMP002", "CMP003", "CMP005", "MOD001", "MOD003", "SHP001", "NUM001")

MASSIVE = 2.0**17


def build_model() -> nn.Module:
    model = trained()
    with torch.no_grad():
        model.b[2].u.weight[7] *= MASSIVE
        model.b[2].dn.weight[:, 7] /= MASSIVE
    return in_fp8(model)
