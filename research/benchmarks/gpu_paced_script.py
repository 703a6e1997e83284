"""A plain training script whose steps the GPU sets the pace of, to run alone and under ``fp8doctor run``.

Prints the wall time and the median of the steps behind the watched window, in ms.
"""

import itertools
import statistics
import sys
import time

import torch
from torch import Tensor, nn

WIDTH, INNER, BLOCKS, TOKENS, STEPS, SKIPPED = 4096, 16384, 8, 8192, 130, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    events, began = [], 0.0
    for step in range(STEPS):
        if step == SKIPPED:
            torch.cuda.synchronize()
            began = time.perf_counter()
        if step >= SKIPPED:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - began) / (STEPS - SKIPPED) * 1e3
    steps = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
    print(f"wall {wall_ms:.3f} ms/step, median {statistics.median(steps):.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
