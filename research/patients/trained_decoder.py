"""Four blocks of width 2048, trained here on a made-up language for some seconds, then converted and
compiled: FP8 keeps its precision."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "patients"))

import torch
import torch.nn as nn
from decoder_468m import LM, loss
from torchao.float8 import convert_to_float8_training

__all__ = ["build_model", "example_batch", "loss"]

MUST: tuple[str, ...] = ()
MUST_NOT = (
    "CMP001",
    "CMP002",
    "CMP003",
    "CMP005",
    "MOD001",
    "MOD003",
    "SHP001",
    "NUM001",
    "NUM003",
)
SILENT = True

STEPS, WORDS, SUCCESSORS = 300, 1024, 4


@cache
def language() -> torch.Tensor:
    """Each word's successors."""
    return torch.randint(0, WORDS, (WORDS, SUCCESSORS), generator=torch.Generator().manual_seed(0)).cuda()


def text(batch: int, tokens: int, seed: int) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    which = torch.randint(0, SUCCESSORS, (tokens, batch), device="cuda", generator=draw)
    said = [torch.randint(0, WORDS, (batch,), device="cuda", generator=draw)]
    for each in which[1:]:
        said.append(language()[said[-1], each])
    return torch.stack(said, 1)


@cache
def trained() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LM(width=2048, layers=4, heads=16, hidden=8192).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for seed in range(STEPS):
        tokens = text(8, 512, seed)
        loss(model(tokens)[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def in_fp8(model: nn.Module) -> nn.Module:
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "head")
    for block in model.b:
        block.compile()
    return model


def build_model() -> nn.Module:
    return in_fp8(trained())


def example_batch() -> torch.Tensor:
    return text(16, 1024, STEPS)
