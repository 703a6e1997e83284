"""A search model of two unlike text towers: queries of 32 tokens, documents of 256, a contrastive loss in the
batch. fp32 weights under autocast to BF16, every block compiled by the user: what would FP8 give?"""

from __future__ import annotations

from functools import partial

import torch
from plain import DEVICE, by_block, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
WHOLE = False
QUERY, DOCUMENT = size(((6, 768, 12), (12, 1536, 24)), ((2, 64, 4), (2, 64, 4)))
VOCABULARY, PAIRS, WORDS, LENGTH, SHARED = size((50000, 128, 32, 256, 512), (256, 4, 16, 32, 32))
TEMPERATURE = 0.02
TOWERS = ("query.layers", "document.layers")
STATIC = "compile-static"
"""Both towers are of one class: torch compiles the second one for any size, if it is not told otherwise."""
VARIANTS = changes(*TOWERS, skip=("projection",)) | {STATIC: partial(by_block, lists=TOWERS, dynamic=False)}
autocast = torch.bfloat16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Tower(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.projection = nn.LayerNorm(width), nn.Linear(width, SHARED, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return functional.normalize(self.projection(self.norm(x).mean(1)), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = Tower(*QUERY, WORDS), Tower(*DOCUMENT, LENGTH)

    def forward(self, queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        likeness = self.query(queries) @ self.document(documents).T / TEMPERATURE
        return functional.cross_entropy(likeness.float(), torch.arange(len(likeness), device=likeness.device))


def build_model() -> nn.Module:
    with torch.device(DEVICE):
        model = TwoTowers()
    return by_block(model, TOWERS)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")


def example_batch() -> dict[str, torch.Tensor]:
    return {
        "queries": torch.randint(0, VOCABULARY, (PAIRS, WORDS), device=DEVICE),
        "documents": torch.randint(0, VOCABULARY, (PAIRS, LENGTH), device=DEVICE),
    }


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
