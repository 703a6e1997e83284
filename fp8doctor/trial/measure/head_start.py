"""Whether the host sets the pace of a step, asked without a profiler before the arms are timed.

The GPU is kept busy while the host launches what it can of a backward and the optimizer, about a thousand
kernels. What is shorter for that head start waits for its launches; what the GPU sets the pace of takes as
long as ever. The wait begins with the backward: a forward of transformers asks the GPU whether sequences are
packed, and would wait with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from fp8doctor.trial.measure.attempt import Ready

log = logging.getLogger(__name__)

HOST_BOUND = 0.08
"""Share that the head start saves from which on the host is said to set the pace. A choice, below the tenth
of the step that STP001 speaks of, since the queue of a GPU holds only a part of the launches."""

ROUNDS, LONG_STEP_S = 2, 0.2
"""Steps of each kind, of which the shortest counts, and the seconds of a step of which one is enough."""

CYCLES = 10**7
"""Cycles of the GPU's clock, some 5 ms, by whose time the wait is told how long to be."""


def waits_for_host(ready: Ready, device: torch.device) -> bool:
    """Whether a head start of the launches makes the step of an arm shorter, one of a single micro-batch;
    False on a CPU, and where torch has nothing to keep a GPU busy with."""
    wait = getattr(torch.cuda, "_sleep", None)  # private; torch 2.6 to 2.13
    if device.type != "cuda" or wait is None:
        return False
    rounds = 1 if ready.step_s > LONG_STEP_S else ROUNDS
    wait(CYCLES)  # loads its kernel
    waited_ms = _ms(partial(wait, CYCLES))
    usual_ms = min(_backward_ms(ready) for _ in range(rounds))
    cycles = int(CYCLES * usual_ms / waited_ms)
    ahead_ms = min(_backward_ms(ready, partial(wait, cycles)) for _ in range(rounds))
    log.debug("backward and optimizer %.1f ms, launched ahead %.1f ms", usual_ms, ahead_ms)
    return saves(usual_ms, ahead_ms)


def saves(usual_ms: float, ahead_ms: float) -> bool:
    """Whether the head start saved a good part."""
    return 1.0 - ahead_ms / usual_ms > HOST_BOUND


def _backward_ms(ready: Ready, first: Callable[[], object] = lambda: None) -> float:
    """Time a step on the GPU from its backward on, after what is enqueued first."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def mark() -> None:
        first()
        begin.record()

    ready.before_backward.append(mark)
    try:
        return _ms(ready.step, begin)
    finally:
        ready.before_backward.remove(mark)


def _ms(enqueue: Callable[[], object], begin: torch.cuda.Event | None = None) -> float:
    """Time what is enqueued on the GPU, from its own mark on if it has one."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    marks[0].record()
    enqueue()
    marks[1].record()
    marks[1].synchronize()
    return float((begin or marks[0]).elapsed_time(marks[1]))
