"""A plain BF16 MLP of eight 8192-wide layers under torch.compile: no FP8, none asked for."""

import torch
import torch.nn as nn

MUST: tuple[str, ...] = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001")
SILENT = True

DEVICE = "cuda" if torch.cuda.is_available() else "meta"

with torch.device(DEVICE):
    model = torch.compile(
        nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(8))).bfloat16()
    )


def example_batch() -> torch.Tensor:
    return torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
