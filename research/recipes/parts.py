"""What a recipe is, and what several rebuilt models are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

LENGTH = 2048
"""Tokens of a sequence where a recipe leaves it open; written in README.md."""


@dataclass(frozen=True)
class Recipe:
    """A configuration in a public repository, and the model of one rank that it trains."""

    name: str
    path: str
    """Repository, and path within it."""
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    gpu: str = "H100"
    autocast: torch.dtype | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    stand_in: str = ""
    """What stands in for what."""


def on_meta(build: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model without its weights."""
    with torch.device("meta"):
        return build().to(dtype)


def tokens(batch: int, length: int, labels: bool = True) -> dict[str, Tensor]:
    """Token ids, and as many labels."""
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}


class Block(nn.Module):
    """A decoder's block with one GEMM for queries, keys and values; gated where ``gated``."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, gated: bool = True, linear: Any = nn.Linear
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.splits = [width, kv_heads * self.size, kv_heads * self.size]
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wqkv = linear(width, sum(self.splits), bias=False)
        self.wo = linear(width, width, bias=False)
        self.w1, self.w2 = linear(width, hidden, bias=False), linear(hidden, width, bias=False)
        self.w3 = linear(width, hidden, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.wqkv(self.attention_norm(x)).split(self.splits, -1)
        queries, keys, values = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        x = x + self.wo(seen.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        up = self.w1(y)
        return x + self.w2(nn.functional.silu(up) * self.w3(y) if self.w3 else nn.functional.gelu(up))


class Decoder(nn.Module):
    """Embedding, blocks and head."""

    def __init__(
        self, blocks: Iterable[nn.Module], width: int, vocabulary: int, linear: Any = nn.Linear
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        self.lm_head = linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def checkpointed(blocks: nn.ModuleList, selective: bool = False) -> None:
    """Wrap every block as torchtitan does, whole or with what its GEMMs made kept."""
    settings: dict[str, Any] = {}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, keep_gemms)
    for i, block in enumerate(blocks):
        blocks[i] = checkpoint_wrapper(block, **settings)


def keep_gemms(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Recompute what is not a GEMM."""
    gemms = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
    return CheckpointPolicy.MUST_SAVE if operator in gemms else CheckpointPolicy.PREFER_RECOMPUTE


def compiled(blocks: nn.ModuleList) -> None:
    for block in blocks:
        block.compile(fullgraph=True)


def sides_of_16(module: nn.Module) -> bool:
    """Whether FP8 GEMMs take this Linear."""
    return isinstance(module, nn.Linear) and not (module.in_features % 16 or module.out_features % 16)
