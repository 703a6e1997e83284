"""Four Transformer Engine blocks, trained one step inside te.autocast: FP8 runs in every te.Linear."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "CMP001")
SILENT = True


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width, dtype=torch.bfloat16)
        self.up = te.Linear(width, 4 * width, bias=False, params_dtype=torch.bfloat16)
        self.down = te.Linear(4 * width, width, bias=False, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, fp8: bool) -> None:
        super().__init__()
        self.fp8 = fp8
        self.embedding = torch.nn.Embedding(32000, 2048, dtype=torch.bfloat16)
        self.blocks = torch.nn.ModuleList(Block(2048) for _ in range(4))
        self.head = torch.nn.Linear(2048, 32000, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with te.autocast(enabled=self.fp8, recipe=Float8CurrentScaling()):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def example_batch() -> torch.Tensor:
    return torch.randint(0, 32000, (8, 1024), device="cuda")


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), batch.flatten())


def trained_once(model: torch.nn.Module) -> torch.nn.Module:
    batch = example_batch()
    loss(model(batch), batch).backward()
    return model


def build_model() -> torch.nn.Module:
    return trained_once(Model(fp8=True).cuda())
