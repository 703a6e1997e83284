"""The blocks of te_autocast under Transformer Engine's own checkpoint, which opens FP8 again for the
recompute."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from te_autocast import Model, example_batch, loss, trained_once
from transformer_engine.common.recipe import Float8CurrentScaling

__all__ = ["build_model", "example_batch", "loss"]

MUST: tuple[str, ...] = ()
MUST_NOT = ("CKP002", "MOD001", "MOD002", "CMP001", "SHP001")
SILENT = True


class Checkpointed(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            for block in self.blocks:
                x = te.checkpoint(block, x)
        return self.head(x)


def build_model() -> torch.nn.Module:
    return trained_once(Checkpointed(fp8=True).cuda())
