"""DLRM: embedding tables, their products, and a wide MLP whose Linears are in FP8, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional

TABLES, ROWS, DIM, DENSE, BATCH = size((26, 20000, 128, 13, 16384), (4, 100, 16, 13, 32))
BOTTOM, TOP = size(((512, 256, 128), (4096, 4096, 4096, 1)), ((32, 16), (64, 64, 1)))
VARIANTS = changes()


def mlp(inward: int, widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inward, width), nn.ReLU()]
        inward = width
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        pairs = TABLES * (TABLES + 1) // 2
        self.bottom, self.top = mlp(DENSE, BOTTOM), mlp(DIM + pairs + (-pairs) % 16, TOP)
        self.pad = (-pairs) % 16
        self.register_buffer("upper", torch.triu_indices(TABLES + 1, TABLES + 1, 1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        found = [x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(found, 1)
        products = (stacked @ stacked.transpose(1, 2))[:, self.upper[0], self.upper[1]]
        return self.top(functional.pad(torch.cat((x, products), 1), (0, self.pad)))


def build_model() -> nn.Module:
    with built():
        model = DLRM()
    return to_float8(model)


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "dense": torch.randn(BATCH, DENSE, device=DEVICE, dtype=torch.bfloat16),
        "sparse": torch.randint(0, ROWS, (BATCH, TABLES), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(output.float(), (batch["dense"][:, :1] > 0).float())
