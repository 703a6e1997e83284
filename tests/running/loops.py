"""Small models, their data, and a loop that trains them in this process."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output: torch.Tensor = x + scale * self.down(nn.functional.gelu(self.up(x)))
        return output


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale)
        return x


class Slicing(Net):
    """Makes a ModuleList in its forward, as the models of transformers do."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x, scale)
        return x


def train(
    model: Any, steps: int, call: Callable[..., Any] | None = None, optimizer: Any = None
) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = (model if call is None else call)(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer  # type: ignore[no-any-return]


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.ones(16)


def float8(recipe: str = "tensorwise", blocks: int = 3, model: nn.Module | None = None) -> nn.Module:
    """Return a model in FP8, whose matmuls are computed in 32 bits as the CPU may have no others."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    torch.manual_seed(0)
    converted: nn.Module = convert_to_float8_training(model or Net(blocks), config=config)
    return converted
