"""What 'fp8doctor run' costs a script's steps outside of its window.

The very same loop, in one process: stretches of steps before the watching, then pairs of them with and
without the hook that stays on torch's optimizers, in turn. Before and after show what else stays, such as an
attached CUPTI (``--no-profile``: without the profile of a step). The steps are short on purpose, and the host
sets their pace: a longer step hides more. Bound: 1 %.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8doctor.running import step_profiler
from fp8doctor.running.observer import ScriptObserver
from fp8doctor.running.script_messages import WatchOptions
from research.benchmarks.machine import machine

BOUND_PCT, PAIRS, STEPS, CALLS = 1.0, 41, 50, 100_000


def main() -> int:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]).to("cuda" if on_gpu else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(64, 128, device=model[0].weight.device)
    clock = time.perf_counter if on_gpu else time.process_time

    def stretch() -> float:
        began = clock()
        for _ in range(STEPS):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        return (clock() - began) / STEPS * 1e3

    if "--no-profile" in sys.argv:
        step_profiler.LONGEST_MS = 0.0
    settings = WatchOptions("train.py", 3, 2, stop=False, budget_s=None, device=None)
    before = statistics.median([stretch() for _ in range(2 * PAIRS)][PAIRS:])
    observer = ScriptObserver(lambda message: None, settings)
    observer.install()
    stretch()
    assert observer.done
    observer.handle.remove()
    plain, watched = [], []
    for pair in range(PAIRS):
        for with_hook in (pair % 2 == 0, pair % 2 == 1):
            handle = register_optimizer_step_post_hook(observer.hook) if with_hook else None
            (watched if with_hook else plain).append(stretch())
            if handle is not None:
                handle.remove()
    shares = [100 * (mine / theirs - 1) for mine, theirs in zip(watched, plain, strict=True)]
    began = time.process_time()
    for _ in range(CALLS):
        observer.hook(optimizer, (optimizer,), {})
    hook_us = (time.process_time() - began) / CALLS * 1e6
    step_ms, more = statistics.median(plain), statistics.median(shares)
    print(f"{machine(['torch'])}\n")
    stays = 100 * (step_ms / before - 1)
    print(f"time of a step: {before:.3f} ms before the watching, {stays:+.2f} % after it")
    print(f"after it: {step_ms:.3f} ms without, {statistics.median(watched):.3f} ms with the hook")
    print(f"more, in the median of {PAIRS} pairs: {more:+.2f} % (bound {BOUND_PCT} %)")
    print(f"the hook alone: {hook_us:.2f} us, {hook_us / step_ms / 10:.4f} % of that step")
    return int(more > BOUND_PCT)


if __name__ == "__main__":
    sys.exit(main())
