"""The small Transformer Engine blocks of te_tiny, which wait for their host, while other processes keep each
of its cores busy twice over."""

from __future__ import annotations

import os
import subprocess
import sys

import te_tiny
import torch
from te_tiny import example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("STP001",)
MUST_NOT = ("MOD001", "MOD002", "CMP001", "CKP002", "SHP001")

NEIGHBOUR = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Computes until the process that started it has ended."""


def build_model() -> torch.nn.Module:
    model = te_tiny.build_model()
    for _ in range(2 * len(os.sched_getaffinity(0))):
        subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    return model
