"""A compiled FP8 decoder behind a projection of a million audio frames, which is converted too and was left
out of the compilation."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "patients"))

import torch
import torch.nn as nn
from decoder_468m import Block
from torchao.float8 import convert_to_float8_training

MUST = ("CMP001",)
MUST_NOT = ("CMP002", "CMP003", "CMP005", "MOD001", "MOD003", "SHP001", "STP001", "STP004")

FRAMES, FEATURES, WIDTH = 128, 256, 2048


class Speech(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.frames = nn.Linear(FEATURES, FEATURES, bias=False)
        self.project = nn.Linear(FEATURES, WIDTH, bias=False)
        self.b = nn.ModuleList(Block(WIDTH, 16, 4 * WIDTH) for _ in range(layers))

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        batch, frames, _ = audio.shape
        x = self.frames(audio).view(batch, frames // FRAMES, FRAMES, FEATURES).mean(2)
        x = self.project(x)
        for block in self.b:
            x = block(x)
        return x.float().square().mean()


def build_model(layers: int = 4) -> nn.Module:
    with torch.device("cuda"):
        model = Speech(layers).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "project")
    for block in model.b:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(8, 1024 * FRAMES, FEATURES, dtype=torch.bfloat16, device="cuda")
