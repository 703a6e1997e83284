"""A mixture of experts in DeepSeek's manner: a wide shared expert of Linears, and 16 small ones, two a token,
whose weights are 3-D and go through torch's grouped matmul. BF16, eager: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
WHOLE = False
LAYERS, WIDTH, SHARED, HEADS = size((6, 2048, 8192, 16), (2, 64, 128, 4))
EXPERTS, CHOSEN, INNER = size((16, 2, 1408), (4, 2, 64))
VOCABULARY, BATCH, LENGTH = size((32000, 4, 4096), (256, 2, 32))
SKIP = ("router", "head")
VARIANTS = changes("layers", skip=SKIP)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, choice = self.router(x).float().softmax(-1).topk(CHOSEN, -1)
        order = choice.flatten().argsort(stable=True)
        ends = functional.one_hot(choice.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
        sent = x[order // CHOSEN]
        gate, up = torch._grouped_mm(sent, self.up, offs=ends).chunk(2, -1)
        back = torch._grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        back = back * weights.flatten()[order, None].to(back.dtype)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, back)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, SHARED, bias=False), nn.Linear(WIDTH, SHARED, bias=False)
        self.down = nn.Linear(SHARED, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = self.norm_mlp(x)
        shared = self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return x + shared + self.experts(inner.flatten(0, 1)).view_as(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), ids[:, 1:].flatten())


def build_model() -> nn.Module:
    with built():
        return Decoder()


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
