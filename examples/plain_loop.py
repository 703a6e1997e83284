"""Residual blocks over tokens in a plain loop, their Linears in torchao's Float8, every block compiled.

fp8doctor run plain_loop.py
fp8doctor run plain_loop.py --no-compile    # FP8 Linears that are not compiled: CMP001
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import convert_to_float8_training


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width, layers, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--output", help="file for the trained weights")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(arguments.deterministic)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(arguments.width, arguments.layers, arguments.vocabulary).to(device, torch.bfloat16)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "head")
    if not arguments.no_compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    tokens = torch.randint(0, arguments.vocabulary, (arguments.batch * arguments.steps, arguments.length))
    for (batch,) in DataLoader(TensorDataset(tokens), batch_size=arguments.batch, shuffle=True):
        batch = batch.to(device)
        logits = model(batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    if arguments.output:
        torch.save(model.state_dict(), arguments.output)


if __name__ == "__main__":
    main()
