"""Time the variants of a trial in turn, and those that the memory does not hold in pairs."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

from fp8doctor.analysis.variant_words import variant_in_a_sentence
from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.measure.attempt import Attempt, Ready, Samples, raised
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget, Cost
from fp8doctor.trial.measure.memory_fit import WORTH_FREEING, beyond_gpu, gpu_gib, room_gib
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.timer import interleave, is_decided, sign_is_told


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


_log = logging.getLogger("fp8doctor")


def time_in_pairs(tracer: Tracer, attempts: Sequence[Attempt], samples: Samples) -> None:
    """Time every arm that did not fit, each alone beside the reference, and add it to ``samples``.

    The reference is eager BF16, else the step as it is.
    """
    timed = {attempt.plan.name: attempt for attempt in attempts if attempt.no_number is None}
    reference = timed.get(ArmName.BF16) or timed.get(ArmName.AS_IS)
    if reference is None:
        return
    budget = tracer.run.budget
    latest = budget.window_latest({})
    for attempt in attempts:
        takes_s = reference.build_s + attempt.build_s  # at the least: what runs out of memory does so early
        fits = time.monotonic() + takes_s <= _built_by(reference, budget)
        if attempt.why is not Reason.OUT_OF_MEMORY or not fits:
            continue
        room = room_gib(tracer.bench.device)
        if room is not None and tracer.bench.frees_gib() < WORTH_FREEING * room:
            continue
        beside = reference.plan.name
        which = f"{variant_in_a_sentence(attempt.plan.name)} beside {variant_in_a_sentence(beside)} alone"
        tracer.run.progress(f"timing {which}", attempt.plan.name)
        again, found = _pair(tracer, attempt, reference, attempts[0], samples, latest)
        attempt.no_number = again.no_number
        if attempt.no_number is None:
            attempt.ready, attempt.beside = again.ready, beside
            samples.update(found)
            tracer.prove(attempt, explain=attempt in tracer.compared(attempts, samples))


def _built_by(reference: Attempt, budget: Budget) -> float:
    """Return the clock at which both of a pair have to be built, to be timed in their least window; an arm is
    taken for as slow as the reference."""
    steps_s = tuple(ready.step_s for ready in reference.ready)
    return budget.build_until({name: Cost(reference.build_s, steps_s) for name in ("reference", "arm")})


def _pair(
    tracer: Tracer, attempt: Attempt, reference: Attempt, as_is: Attempt, samples: Samples, latest: float
) -> tuple[Attempt, Samples]:
    """Build the arm anew beside the reference and time both, after everything else was let go of.

    Its samples are those of the reference in the common window times the ratio of the pair.
    """
    bench = tracer.bench
    bench.let_go()
    beside, again = Attempt(reference.plan), Attempt(attempt.plan)
    for each in (beside, again):
        bench.build(each, _built_by(reference, tracer.run.budget))
    if again.why is Reason.OUT_OF_MEMORY:
        sentence = f"the GPU's memory is too small for it, even beside {reference.plan.name} alone"
        again.no_number = NoNumber(Reason.DOES_NOT_FIT, sentence)
    elif beyond := beyond_gpu(again, [as_is, again], bench.plan, gpu_gib(bench.device)):
        bench.drop(again, beyond)
    again.no_number = again.no_number or beside.no_number
    if again.no_number:
        return again, {}
    try:
        budget = tracer.run.budget
        pair = interleave_arms(bench, (beside, again), lambda _: budget.end, latest, budget.window_soon())
    except Exception as error:
        _log.debug("timing %s in a pair raises", attempt.plan.name, exc_info=True)
        bench.drop(again, raised(error))
        return again, {}
    found: Samples = {}
    for number in range(len(again.ready)):
        mine, other = pair[attempt.plan.name, number], pair[reference.plan.name, number]
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        found[attempt.plan.name, number] = [ratio * each for each in samples[reference.plan.name, number]]
    return again, found
