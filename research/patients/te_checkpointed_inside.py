"""Wide Transformer Engine blocks under torch's checkpoint, the FP8 autocast opened inside each block: the
recompute runs in FP8.

With 1,024 rows the forward casts as much as it multiplies, and the backward casts the small gradients only:
recomputing costs FP8 more than BF16. And the GPU has room for all activations.
"""

from __future__ import annotations

import te_autocast
import torch
import transformer_engine.pytorch as te
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformer_engine.common.recipe import Float8CurrentScaling

MUST = ("CKP001",)
MUST_NOT = ("CKP002", "MOD001", "MOD002", "CMP001", "SHP001")

WIDTH = 4096


class Block(te_autocast.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return super().forward(x)


class Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(checkpoint_wrapper(Block(WIDTH)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def example_batch() -> torch.Tensor:
    return torch.randn(1024, WIDTH, device="cuda", dtype=torch.bfloat16)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


def build_model(layers: int = 8) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Model(layers).cuda()
    batch = example_batch()
    loss(model(batch), batch).backward()
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
