"""A Llama 3,072 wide on one sequence of 16,384 tokens, as torchtitan sets one up: tensorwise FP8 but for the
head, each block inside torch's checkpoint_wrapper and compiled."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.nn import functional
from torchao.float8 import convert_to_float8_training

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((8, 3072, 8192, 24, 8), (2, 64, 128, 4, 2))
VOCABULARY, LENGTH = size((32000, 16384), (256, 64))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * WIDTH // HEADS, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * WIDTH // HEADS, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in (turned(q, angles), turned(k, angles), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        normed = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(normed)) * self.w3(normed))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        half = WIDTH // HEADS // 2
        rates = 500000.0 ** (-torch.arange(half, device=tokens.device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(self.norm(x))


def unwrapped(model: Transformer) -> Transformer:
    """Take the wrappers off; a block that was compiled with its wrapper is compiled without it."""
    for index, block in enumerate(model.layers):
        if isinstance(block, CheckpointWrapper):
            model.layers[index] = block._checkpoint_wrapped_module
            if block._compiled_call_impl is not None:
                model.layers[index].compile()
    return model


VARIANTS = {**changes("layers", skip=("output",)), "checkpointing-off": unwrapped}


def build_model() -> nn.Module:
    with built():
        model = Transformer()
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name != "output")
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)
        model.layers[index].compile()
    return model


def example_batch() -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, VOCABULARY, (1, LENGTH), device=DEVICE)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), batch["tokens"][:, 1:].flatten())
