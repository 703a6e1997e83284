"""FP8 that is emulated, as it was for a first try on a laptop: the casts are there, the FP8 GEMMs are not."""

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MUST = ("emulated-fp8",)
MUST_NOT = ("MOD001", "MOD003", "MOD004", "hooks-or-subclass-lost", "CMP001", "CMP002", "SHP001")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


class Block(nn.Module):
    """A residual block of two wide Linears."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_model(layers: int = 4) -> nn.Module:
    with torch.device(DEVICE):
        model = nn.Sequential(*(Block() for _ in range(layers))).bfloat16()
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    for block in model:
        block.compile()
    return model


def example_batch() -> torch.Tensor:
    return torch.randn(8192, 2048, dtype=torch.bfloat16, device=DEVICE)
