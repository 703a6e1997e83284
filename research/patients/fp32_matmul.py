"""The compiled FP8 decoder whose head casts both operands up and multiplies in fp32."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "patients"))

import decoder_468m_compiled
import torch
import torch.nn as nn
from decoder_468m_compiled import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("STP004",)
MUST_NOT = ("CMP001", "CMP002", "CMP003", "CMP005", "MOD001", "MOD003", "SHP001")


class Head(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() @ self.weight.float().T


def build_model(layers: int = 24) -> nn.Module:
    model = decoder_468m_compiled.build_model(layers)
    model.head = Head(1024, 32000, bias=False, dtype=torch.bfloat16, device="cuda")
    return model
