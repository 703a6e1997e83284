"""A byte-level GPT with squared ReLUs and normed queries and keys, trained by a script:
``fp8doctor run --stop byte_gpt_script.py``. Tensorwise FP8 but for the head, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size, to_float8
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

RECIPE = "tensorwise"
WHOLE = False
LAYERS, WIDTH, HEADS = size((12, 2048, 16), (2, 64, 4))
VOCABULARY, BATCH, LENGTH, STEPS = size((512, 8, 2048, 60), (64, 2, 32, 20))
SKIP = ("head",)
VARIANTS = changes("blocks", skip=SKIP)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = functional.rms_norm(q, q.shape[-1:]), functional.rms_norm(k, k.shape[-1:])
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(self.norm_mlp(x))).square())


class ByteGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model() -> nn.Module:
    with built():
        model = ByteGPT()
    return to_float8(model, "tensorwise", skip=SKIP)


def example_batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=DEVICE)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    text = TensorDataset(torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH)))
    for step, (batch,) in enumerate(DataLoader(text, batch_size=BATCH, shuffle=True)):
        batch = batch.to(DEVICE)
        value = loss(model(batch), batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step} loss {value.item():.4f}")


if __name__ == "__main__":
    main()
