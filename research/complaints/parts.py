"""What several rebuilt models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Pair(nn.Module):
    """Up and down, four times as wide."""

    def __init__(self, kind: Callable[..., nn.Module], width: int) -> None:
        super().__init__()
        self.up, self.down = kind(width, 4 * width), kind(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def mlp(kind: Callable[..., nn.Module], width: int, pairs: int) -> nn.Sequential:
    """So many pairs, as a decoder of this width has."""
    return nn.Sequential(*(Pair(kind, width) for _ in range(pairs)))


def ran_in_te(make: Callable[[Any], nn.Module], width: int, recipe: str = "DelayedScaling") -> nn.Module:
    """What ``make`` builds of Transformer Engine's layers, after a forward in FP8."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    with torch.device("meta"):
        model = make(te).bfloat16()
    with te.autocast(enabled=True, recipe=getattr(recipes, recipe)()):
        model(rows(16, width))
    return model


def rows(count: int, width: int) -> Tensor:
    return torch.empty(count, width, dtype=torch.bfloat16, device="meta")


class GroupedExperts(nn.Module):
    """torchtitan's: one 3-D weight for each of three Linears, and a grouped GEMM."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.w1 = nn.Parameter(torch.empty(experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.num_experts
        ends = torch.arange(rows, x.shape[0] + 1, rows, device=x.device, dtype=torch.int32)
        up = torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)
        gate = torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(nn.functional.silu(up) * gate, self.w2.transpose(-2, -1), offs=ends)


class MoeBlock(nn.Module):
    """Attention's projections, a router and the experts."""

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = GroupedExperts(experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wo(self.wq(x))
        return x + self.experts(x) * self.router(x).sigmoid().mean(-1, keepdim=True)


def te_moe(kind: Callable[..., nn.Module], width: int, experts: int, hidden: int) -> MoeBlock:
    """The block with the projections in another class."""
    block = MoeBlock(width, experts, hidden)
    block.wq, block.wo = kind(width, width), kind(width, width)  # type: ignore[assignment]
    return block


class TeExperts(nn.Module):
    """Experts in Transformer Engine's GroupedLinear."""

    def __init__(self, kind: Callable[..., Any], experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.experts = experts
        self.up, self.down = kind(experts, width, 2 * hidden), kind(experts, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        splits = [x.shape[0] // self.experts] * self.experts
        up, gate = self.up(x, splits).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(up) * gate, splits)
