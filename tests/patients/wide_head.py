"""A student that predicts its teacher's features of every patch: the head is converted and compiled with its
blocks, is no vocabulary's, and is wide enough to gain."""

import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

MUST: tuple[str, ...] = ()
MUST_NOT = ("SHP002", "SHP003", "CMP001", "CMP002", "MOD001", "MOD004")
SILENT = True

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4096)
        self.mlp = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return patches + self.mlp(self.norm(patches))


class Student(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(4096, 6144)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            patches = block(patches)
        return self.head(patches)


def build_model(layers: int = 8) -> nn.Module:
    with torch.device(DEVICE):
        model = Student(layers).bfloat16()
    convert_to_float8_training(model)
    for part in (*model.blocks, model.head):
        part.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(16, 1024, 4096, dtype=torch.bfloat16, device=DEVICE)


def loss(features: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(features, torch.ones_like(features))
