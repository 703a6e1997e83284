"""Twelve Transformer Engine blocks of width 256 with 512 tokens: every layer is a few microseconds for the
GPU, and more for the host."""

from __future__ import annotations

import te_autocast
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

MUST = ("STP001",)
MUST_NOT = ("MOD001", "MOD002", "CMP001", "CKP002", "SHP001")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(te_autocast.Block(256) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            for block in self.blocks:
                x = block(x)
        return x


def example_batch() -> torch.Tensor:
    return torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


def build_model() -> torch.nn.Module:
    model, batch = Model().cuda(), example_batch()
    loss(model(batch), batch).backward()
    return model
