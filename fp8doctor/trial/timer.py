"""Timing of several arms in turn, A B C A B C ..., so that clocks, heat and neighbours are shared by all.

One visit runs a few steps of one arm and drops the first, which pays for what the arm before left in the caches. The
figure of a visit is the median of the rest. CUDA events time the GPU, the clock of the host a CPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import torch

STEPS_PER_VISIT = 3
"""Of which the first is dropped."""

LEAST_ROUNDS, MOST_ROUNDS = 6, 15
"""The range of six rounds covers the true median with 97 % (1 - 2 / 2^6, `fp8doctor.interval`); more sharpen it."""


def visit_ms(step: Callable[[], object], device: torch.device, steps: int = STEPS_PER_VISIT) -> float:
    """Median time of one step in ms over ``steps`` in a row, the first dropped."""
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
        for mark in marks[:-1]:
            mark.record()
            step()
        marks[-1].record()
        torch.cuda.synchronize(device)
        times = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]
    else:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def interleave(
    steps: Mapping[Hashable, Callable[[], object]],
    device: torch.device,
    until: float,
    after_round: Callable[[int], None] = lambda number: None,
) -> dict[Hashable, list[float]]:
    """Visit every step in turn until the clock (``time.monotonic``) passes ``until``; at least and at most the rounds above.

    Returns the samples of each, in ms, one per round and all of one length.
    """
    samples: dict[Hashable, list[float]] = {key: [] for key in steps}
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.monotonic() > until:
            break
        for key, step in steps.items():
            samples[key].append(visit_ms(step, device))
        after_round(number)
    return samples
