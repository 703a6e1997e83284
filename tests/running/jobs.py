"""Training scripts as people write them, each misconfigured the way people do it."""

from __future__ import annotations

PLAIN_LOOP = """
import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import convert_to_float8_training


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.1, self.training))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32) for _ in range(3)]).bfloat16()
    convert_to_float8_training(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = TensorDataset(torch.randn(16 * arguments.steps, 32, dtype=torch.bfloat16))
    with torch.backends.mkldnn.flags(enabled=False):
        for (x,) in DataLoader(rows, batch_size=16, shuffle=True):
            loss = (model(x) - x.roll(1, 1)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
    state = b"".join(each.detach().float().numpy().tobytes() for each in model.parameters())
    print(hashlib.sha256(state).hexdigest(), torch.get_rng_state().sum().item(), torch.rand(1).item())


if __name__ == "__main__":
    main()
"""
"""torchao's eager Float8, which is slower than BF16. Its losses, weights and random numbers are printed."""


TWO_STEPS = """
import os

import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
os._exit(9)
"""
