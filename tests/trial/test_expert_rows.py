"""The rows of every expert of a 3-D weight, in the ways in which models multiply by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8doctor.trial.layers.rows import Products

ROWS = (3, 0, 5)


class Experts(nn.Module):
    """Three experts of one weight."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up = way, nn.Parameter(torch.randn(len(ROWS), 32, 16, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "loop":
            parts = x.split(ROWS)
            return torch.cat([nn.functional.linear(each, self.up[i]) for i, each in enumerate(parts)])
        if self.way == "loop of products":
            return torch.cat([each @ self.up[i].t() for i, each in enumerate(x.split(ROWS))])
        if self.way == "batched":
            return torch.bmm(x.expand(3, -1, -1), self.up.transpose(1, 2))
        ends = torch.tensor(ROWS).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)


@pytest.mark.parametrize(
    ("way", "rows"),
    [
        ("loop", [3, 0, 5]),
        ("loop of products", [3, 0, 5]),
        ("grouped", [3, 0, 5]),
        ("batched", [8, 8, 8]),
    ],
)
def test_the_rows_of_every_expert(way: str, rows: list[int]) -> None:
    experts = Experts(way)
    other = nn.Parameter(torch.randn(3, 4, 4))
    seen = Products([], [experts.up])
    with torch.no_grad(), seen:
        torch.bmm(other, other)
        experts(torch.randn(8, 16, dtype=torch.bfloat16))
    assert seen.of_experts(experts.up) == rows
    assert seen.of_experts(other) == []
