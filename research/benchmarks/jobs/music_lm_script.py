"""A language model of four streams of audio codes, as MusicGen's, trained by a script:
``fp8doctor run --stop music_lm_script.py``. rowwise_with_gw_hp but for its heads, blocks compiled by the
script, torch's AdamW as it comes."""

from __future__ import annotations

import torch
from plain import DEVICE, adamw, built, by_block, changes, size, to_float8
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

RECIPE = "rowwise_with_gw_hp"
WHOLE = False
LAYERS, WIDTH, HEADS = size((16, 2048, 32), (3, 64, 4))
STREAMS, CODES, BATCH, LENGTH, STEPS = size((4, 2048, 8, 1504, 80), (2, 64, 2, 32, 20))
SKIP = ("heads",)
VARIANTS = changes("layers", skip=SKIP)
build_optimizer = adamw


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear1 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.linear2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.linear2(functional.gelu(self.linear1(self.norm2(x)))))


class MusicLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.ModuleList(nn.Embedding(CODES, WIDTH) for _ in range(STREAMS))
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CODES, bias=False) for _ in range(STREAMS))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = sum((each(codes[:, at]) for at, each in enumerate(self.codes)), start=self.positions.weight)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return torch.stack([head(x) for head in self.heads], 1)


def build_model() -> nn.Module:
    with built():
        model = MusicLM()
    return by_block(to_float8(model, RECIPE, skip=SKIP), ("layers",))


def example_batch() -> torch.Tensor:
    return torch.randint(0, CODES, (BATCH, STREAMS, LENGTH), device=DEVICE)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[:, :, :-1].flatten(0, 2).float(), batch[:, :, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    model = build_model()
    optimizer = build_optimizer(model)
    music = TensorDataset(torch.randint(0, CODES, (BATCH * STEPS, STREAMS, LENGTH)))
    for step, (batch,) in enumerate(DataLoader(music, batch_size=BATCH, shuffle=True)):
        batch = batch.to(DEVICE)
        value = loss(model(batch), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step} loss {value.item():.4f}")


if __name__ == "__main__":
    main()
