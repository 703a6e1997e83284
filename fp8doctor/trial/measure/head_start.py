"""Whether the host sets the pace of a step, asked without a profiler before the arms are timed.

The GPU is kept busy while the host launches what it can of a step, about a thousand kernels. A step that is
shorter for that head start waits for its launches; one that the GPU sets the pace of takes as long as ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

HOST_BOUND = 0.08
"""Share of the step that the head start saves from which on the host is said to set the pace. A choice, below
the tenth of the step that STP001 speaks of, since the queue of a GPU holds only a part of the launches."""

ROUNDS, LONG_STEP_S = 2, 0.2
"""Steps of each kind, of which the shortest counts, and the seconds of a step of which one is enough."""

CYCLES = 10**7
"""Cycles of the GPU's clock, some 5 ms, by whose time the wait is told how long to be."""


def waits_for_host(step: Callable[[], object], step_s: float, device: torch.device) -> bool:
    """Whether a head start of the launches makes this step, of about ``step_s``, shorter; False on a CPU, and
    where torch has nothing to keep a GPU busy with."""
    wait = getattr(torch.cuda, "_sleep", None)  # private; torch 2.6 to 2.13
    if device.type != "cuda" or wait is None:
        return False
    rounds = 1 if step_s > LONG_STEP_S else ROUNDS
    waited_ms = _ms([partial(wait, CYCLES)], device)[0]
    step()
    usual_ms = min(_ms([step] * rounds, device))
    cycles = int(CYCLES * usual_ms / waited_ms)
    after_wait = _ms([partial(wait, cycles), step] * rounds, device)
    return saves(usual_ms, min(after_wait[1::2]))


def saves(usual_ms: float, ahead_ms: float) -> bool:
    """Whether the head start saved a good part of the step."""
    return 1.0 - ahead_ms / usual_ms > HOST_BOUND


def _ms(enqueued: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Time what is enqueued one after the other on the GPU."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(enqueued) + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark, enqueue in zip(marks[1:], enqueued, strict=True):
        enqueue()
        mark.record()
    torch.cuda.synchronize(device)
    return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]
