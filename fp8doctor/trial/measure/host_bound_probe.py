"""Test if the host sets the pace of a step, and try CUDA graphs if it does.

The GPU is kept busy while the host launches what it can of a forward, and again of a backward and the
optimizer, about a thousand kernels each. A step that this head start makes shorter waits for its launches.
The first wait begins at the first compiled module: before that a model of transformers asks the GPU whether
sequences are packed, and would wait too. No profile exists yet when this is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stacks import torch_private
from fp8doctor.trial.copies.compiling import before_compiled
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.trial_run import TrialRun, still_there

_log = logging.getLogger("fp8doctor")

HOST_BOUND = 0.05
"""Share of the step that the head start saves if the host sets the pace. A choice, below STP001's tenth,
because a GPU's queue holds only a part of the launches: a Gemma 2B that is idle for a fifth of its step saved
7% (H100)."""

ROUNDS, LONG_STEP_S = 2, 0.2
"""Steps of each kind, of which the shortest counts, and the seconds of a step of which one is enough."""

CYCLES = 10**7
"""Cycles of the GPU's clock, some 5 ms, that calibrate the wait."""

STAYS_IN_THIS_PROCESS = NoNumber(
    Reason.NOT_APPLICABLE,
    "the memory of recorded CUDA graphs would stay taken in this process; `fp8doctor model.py` times them in "
    "one of its own",
)


def waits_for_host(ready: Ready, device: torch.device) -> bool:
    """Return whether a head start of the launches shortens the step; False on a CPU."""
    wait = torch_private.busy_wait()
    if device.type != "cuda" or wait is None or ready.model is None:
        return False
    rounds = 1 if ready.step_s > LONG_STEP_S else ROUNDS
    wait(CYCLES)  # loads its kernel
    begin = _mark()
    wait(CYCLES)
    cycles_a_ms = CYCLES / _between_ms([begin], [_mark()])
    usual_ms = min(_step_ms(ready) for _ in range(rounds))
    busy = partial(wait, int(cycles_a_ms * usual_ms))
    ahead_ms = min(_step_ms(ready, busy) for _ in range(rounds))
    _log.debug("forward and backward take %.1f ms, launched ahead %.1f ms", usual_ms, ahead_ms)
    return saves(usual_ms, ahead_ms)


def saves(usual_ms: float, ahead_ms: float) -> bool:
    """Return whether the head start saved a good part."""
    return 1.0 - ahead_ms / usual_ms > HOST_BOUND


def _step_ms(ready: Ready, first: Callable[[], object] = lambda: None) -> float:
    """Time a step on the GPU from its first compiled module on, without the waits."""
    begins: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []

    def forward() -> None:
        if not begins:
            first()
            begins.append(_mark())

    def backward() -> None:
        if begins:
            ends.append(_mark())
        first()
        begins.append(_mark())

    assert ready.model is not None
    ready.before_backward.append(backward)
    try:
        with before_compiled(ready.model, forward):
            ready.step()
    finally:
        ready.before_backward.remove(backward)
    ends.append(_mark())
    return _between_ms(begins, ends)


def _mark() -> torch.cuda.Event:
    """Record an event on the GPU's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between_ms(begins: Sequence[torch.cuda.Event], ends: Sequence[torch.cuda.Event]) -> float:
    """Sum up the spans after the last end."""
    ends[-1].synchronize()
    return float(sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)))


def add_if_host_bound(attempt: Attempt, bench: Bench, attempts: list[Attempt], run: TrialRun) -> None:
    """Add CUDA graph variants before the explorations if this variant is host-bound."""
    plans = attempt.plan.if_host_bound
    if attempt.ready and plans and _waits(attempt, bench):
        first = next((n for n, each in enumerate(attempts) if each.plan.explored), len(attempts))
        against = None if run.own_process else STAYS_IN_THIS_PROCESS
        attempts[first:first] = [Attempt(plan, no_number=run.skipped(plan.name) or against) for plan in plans]


def _waits(attempt: Attempt, bench: Bench) -> bool:
    """Return whether the host sets the pace of a variant; False if the test fails."""
    bench.at_work = attempt.plan.name
    try:
        return waits_for_host(attempt.ready[-1], bench.device)
    except Exception:
        _log.debug("the head start of %s raises", attempt.plan.name, exc_info=True)
        still_there(bench.device, attempt.plan.name)
        bench.forget_gradients()
        return False
