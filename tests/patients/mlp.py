"""A plain MLP in one nn.Sequential, converted by torchao and run eagerly: no blocks, no tokens, only rows."""

import torch
import torch.nn as nn
from torchao.float8 import convert_to_float8_training

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"

with torch.device(DEVICE):
    model = nn.Sequential(
        nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 8192), nn.GELU(), nn.Linear(8192, 2048)
    ).bfloat16()
convert_to_float8_training(model)


def example_batch() -> torch.Tensor:
    return torch.randn(4096, 2048, dtype=torch.bfloat16, device=DEVICE)
