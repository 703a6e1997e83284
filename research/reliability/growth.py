"""Many inspections in one process: nothing grows."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

from fp8doctor import inspect_model
from research.reliability.count import Count
from research.reliability.trials import WIDTH, quick

WARM_UP = 5
"""Inspections after which caches are full."""

MOST_OBJECTS, MOST_MIB = 20, 0.2
"""By how much one inspection may grow the process, on average: counters of torch, and a noisy allocator.
Conventions of this kit."""


def footprint() -> dict[str, float]:
    """What a process can grow in."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "objects": len(gc.get_objects()),
        "memory in MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "processes": len("".join(map(children, os.listdir("/proc/self/task"))).split()),
    }


def children(thread: str) -> str:
    return Path(f"/proc/self/task/{thread}/children").read_text()


def inspected(trial: bool) -> None:
    """One inspection of a model that is thrown away."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    kind = type("Mine", (nn.Sequential,), {})
    inspect_model(kind(model), torch.ones(8, WIDTH), trial=trial, device="cpu", budget_s=0.3)


def growth(tries: int, trial: bool) -> Count:
    """So many inspections, each of which counts as failed when the process has grown after all of them."""
    count, began = (
        Count(f"an inspection {'with' if trial else 'without'} a trial, in one process"),
        time.process_time(),
    )
    with quick():
        for _ in range(WARM_UP):
            inspected(trial)
        before = footprint()
        for _ in range(tries):
            inspected(trial)
            count.tried += 1
        after = footprint()
    count.seconds = time.process_time() - began
    count.failures += grown(before, after, tries)
    return count


def grown(before: dict[str, float], after: dict[str, float], tries: int) -> list[str]:
    """What has grown by more than may be."""
    most = {"objects": MOST_OBJECTS * tries, "memory in MiB": MOST_MIB * tries + 1}
    return [
        f"{name}: {value:.0f} before, {after[name]:.0f} after {tries}"
        for name, value in before.items()
        if after[name] - value > most.get(name, 0)
    ]
