"""After a prescription none is left: what one check leaves out of the conversion no other asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Stack(nn.Module):
    """Square layers, and one beside them."""

    def __init__(self, blocks: int, width: int, **beside: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        for name, (k, n) in beside.items():
            self.add_module(name, nn.Linear(k, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_the_second_prescription_is_empty() -> None:
    with torch.device("meta"):
        model: Any = Stack(8, 4096, score=(4096, 16), frames=(64, 65536), project=(8192, 64))
        model = convert_to_float8_training(model.bfloat16())
    first = inspect_model(model, trial=False)
    assert "keep-in-bf16" in [step.treatment.name for step in first.prescription]
    model = first.prescription.apply(model)
    assert [step.treatment.name for step in inspect_model(model, trial=False).prescription] == []
