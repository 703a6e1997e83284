"""One window of a trial, which goes on beyond its time while it does not tell FP8 from BF16."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fp8doctor.trial.measure.attempt import Attempt, Samples
from fp8doctor.trial.measure.profile_step import Tracer


def time_in_turn(
    tracer: Tracer, attempts: Sequence[Attempt], until: Callable[[Samples], float], latest: float
) -> Samples:
    """Time the arms in turn. What follows has its time however long the sign took, also after an arm that
    raises, so that the budget of ``tracer.run`` is another afterwards."""
    budget, began = tracer.run.budget, time.monotonic()
    rounds, ends = 0, began

    def asked(samples: Samples) -> float:
        nonlocal rounds, ends
        rounds, ends = min(map(len, samples.values()), default=0), until(samples)
        return ends

    try:
        return tracer.bench.time(attempts, asked, latest, budget.window_soon(), budget.open_sign_s)
    finally:
        if rounds:  # else it did not go on beyond the least
            tracer.run = replace(tracer.run, budget=budget.after_window(ends, began, rounds))
