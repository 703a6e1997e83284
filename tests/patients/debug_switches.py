"""A run that was made reproducible to find an error, and stayed so: `enable_full_determinism`, and autograd's
anomaly detection."""

import torch
from torch import nn
from transformers import enable_full_determinism

MUST = ("ENV006",)
MUST_NOT = ("fp8-backend-missing", "ENV005", "MOD001", "CMP001", "STP004", "SHP001")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

enable_full_determinism(0)
torch.autograd.set_detect_anomaly(True)


def build_model(layers: int = 4) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(layers))
    ).to(DEVICE, torch.bfloat16)


def example_batch() -> torch.Tensor:
    return torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16)
