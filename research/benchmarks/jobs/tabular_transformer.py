"""An FT-Transformer over a table of 111 columns, 512 wide: tensorwise FP8, eager, so that the host sets the
pace."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional
from torchao.float8 import convert_to_float8_training

RECIPE = "tensorwise"
LAYERS, WIDTH, HEADS = size((8, 512, 8), (2, 64, 4))
NUMBERS, KINDS, CLASSES, BATCH = size((80, 31, 10, 128), (10, 5, 10, 16))
VARIANTS = changes("blocks", skip=("head",))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        a, b = self.up(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down(self.dropout(a * functional.gelu(b)))


class TabularTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUMBERS, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(NUMBERS, WIDTH))
        self.kinds = nn.Embedding(KINDS * 100, WIDTH)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        columns = numbers[..., None] * self.weight + self.bias
        x = torch.cat((self.cls.expand(len(numbers), -1, -1), columns, self.kinds(kinds)), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build_model() -> nn.Module:
    with built():
        model = TabularTransformer()
    return convert_to_float8_training(model, module_filter_fn=lambda layer, name: name != "head")


def example_batch() -> dict[str, torch.Tensor]:
    offsets = 100 * torch.arange(KINDS, device=DEVICE)
    return {
        "numbers": torch.randn(BATCH, NUMBERS, device=DEVICE, dtype=torch.bfloat16),
        "kinds": torch.randint(0, 100, (BATCH, KINDS), device=DEVICE) + offsets,
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output.float(), batch["kinds"][:, 0] % CLASSES)
