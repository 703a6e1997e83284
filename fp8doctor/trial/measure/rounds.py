"""Time the variants of a trial in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.measure.attempt import Attempt, Ready, Samples
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.timer import Limits, interleave, is_decided, sign_is_known


def time_in_turn(tracer: Tracer, attempts: Sequence[Attempt]) -> Samples:
    """Time the variants at every depth, and watch the GPU and the host meanwhile.

    The rounds go on after their time is up while they do not tell FP8 from BF16.
    """
    bench, budget = tracer.bench, tracer.run.budget
    ready = {
        (attempt.plan.name, number): each for attempt in attempts for number, each in enumerate(attempt.ready)
    }
    plans = [attempt.plan for attempt in attempts if attempt.ready]

    def look() -> None:
        bench.observer.look()
        bench.host.look()
        bench.guard.look()

    samples = interleave(
        {key: _watched(bench, key[0], each) for key, each in ready.items()},
        bench.device,
        Limits(
            budget.rounds_until(attempts),
            budget.rounds_soon(),
            budget.rounds_latest(attempts),
            budget.overtime_s,
        ),
        look,
        begin=torch.manual_seed,  # all skip the same layers at random, and drop the same values
        expected_ms={key: 1e3 * each.step_s for key, each in ready.items()},
        sign_known=lambda samples: sign_is_known(samples, bench.plan, plans),
        decided=lambda samples: is_decided(samples, bench.plan, plans),
    )
    bench.guard.look()  # on a CPU, each block is looked at when the next begins
    return samples


def _watched(bench: Bench, name: str, ready: Ready) -> Callable[[], object]:
    """Take the step, noting whose it is and whether something was compiled in it."""

    def step() -> object:
        bench.at_work, before = name, frames_compiled()
        result = ready.step()
        ready.frames_in_window += frames_compiled() - before
        return result

    return step
