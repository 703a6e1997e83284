"""One window of a trial: the arms are timed in turn, beyond its time while it does not tell FP8 from BF16."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.measure.attempt import Attempt, Ready, Samples
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.decided import is_decided, sign_is_told
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.timer import interleave


def time_in_turn(
    tracer: Tracer, attempts: Sequence[Attempt], until: Callable[[Samples], float], latest: float
) -> Samples:
    """Time the arms in turn, beyond ``until`` while the sign is open."""
    budget = tracer.run.budget
    return interleave_arms(tracer.bench, attempts, until, latest, budget.window_soon(), budget.open_sign_s)


def interleave_arms(
    bench: Bench,
    attempts: Sequence[Attempt],
    until: Callable[[Samples], float],
    latest: float,
    soon: float,
    more_s: float = 0.0,
) -> Samples:
    """Time the arms at every cut by `interleave`, whose clocks these are, and watch the GPU and the host."""
    ready = {
        (attempt.plan.name, number): each for attempt in attempts for number, each in enumerate(attempt.ready)
    }
    plans = [attempt.plan for attempt in attempts if attempt.ready]

    def look() -> None:
        bench.observer.look()
        bench.host.look()
        bench.guard.look()

    with bench.host.window():
        return interleave(
            {key: _watched(bench, key[0], each) for key, each in ready.items()},
            bench.device,
            until,
            look,
            soon=soon,
            latest=latest,
            more_s=more_s,
            expected_ms={key: 1e3 * each.step_s for key, each in ready.items()},
            told=lambda samples: sign_is_told(samples, bench.plan, plans),
            decided=lambda samples: is_decided(samples, bench.plan, plans),
        )


def _watched(bench: Bench, arm: str, ready: Ready) -> Callable[[], object]:
    """Take the step, noting whose it is and whether something was compiled in it."""

    def step() -> object:
        bench.at_work, before = arm, frames_compiled()
        result = ready.step()
        ready.frames_in_window += frames_compiled() - before
        return result

    return step
