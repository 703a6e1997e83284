"""A Switch Transformer's decoder: each token goes to one of eight experts of a fixed capacity, each an MLP of
two Linears. BF16, eager: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.nn import functional

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, EXPERTS = size((4, 2048, 8192, 16, 8), (2, 64, 128, 4, 4))
VOCABULARY, BATCH, LENGTH = size((32000, 8, 2048), (256, 4, 32))
SKIP = ("router", "head")
VARIANTS = changes("layers", skip=SKIP)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.flatten(0, 1)
        capacity = len(flat) * 5 // (4 * EXPERTS)
        shares = self.router(flat).float().softmax(-1)
        gate, choice = shares.max(-1)
        chosen = functional.one_hot(choice, EXPERTS)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        slot = torch.where(place < capacity, choice * capacity + place, EXPERTS * capacity)
        sent = flat.new_zeros(EXPERTS * capacity + 1, WIDTH).index_copy(0, slot, flat)
        parts = sent[:-1].view(EXPERTS, capacity, WIDTH)
        back = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        answers = torch.cat((*back, flat.new_zeros(1, WIDTH)))
        balance = EXPERTS * (chosen.float().mean(0) * shares.mean(0)).sum()
        return (answers[slot] * gate[:, None].to(x.dtype)).view_as(x), balance


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.switch = Switch()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        more, balance = self.switch(self.norm_mlp(x))
        return x + more, balance


class SwitchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, balance = self.embedding(ids), torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), ids[:, 1:].flatten()) + 0.01 * balance


def build_model() -> nn.Module:
    with built():
        return SwitchTransformer()


def example_batch() -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output
