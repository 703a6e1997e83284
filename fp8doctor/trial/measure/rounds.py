"""Time the variants of a trial in turn, and in pairs if not all fit into memory."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.measure.attempt import Attempt, Ready, Samples, raised
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget, Cost
from fp8doctor.trial.measure.memory_fit import WORTH_FREEING, beyond_gpu, gpu_gib, room_gib
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.timer import Limits, interleave, is_decided, sign_is_known

_log = logging.getLogger("fp8doctor")


def time_in_turn(
    tracer: Tracer,
    attempts: Sequence[Attempt],
    until: Callable[[Samples], float],
    latest: float,
    *,
    overtime: bool = True,
) -> Samples:
    """Time the variants at every depth, and watch the GPU and the host meanwhile.

    With ``overtime`` the rounds go on after ``until`` while they do not tell FP8 from BF16.
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

    with bench.host.window():
        samples = interleave(
            {key: _watched(bench, key[0], each) for key, each in ready.items()},
            bench.device,
            Limits(until, budget.rounds_soon(), latest, budget.overtime_s if overtime else 0.0),
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


def time_in_pairs(tracer: Tracer, attempts: Sequence[Attempt], samples: Samples) -> None:
    """Time every variant that did not fit next to the reference, into ``samples``.

    The reference is eager BF16, else the step as it is.
    """
    timed = {attempt.plan.name: attempt for attempt in attempts if attempt.no_number is None}
    reference = timed.get(ArmName.BF16) or timed.get(ArmName.AS_IS)
    if reference is None:
        return
    for attempt in attempts:
        # a variant that runs out of memory does so early, so its build takes at least as long as it took
        built_at = time.monotonic() + reference.build_s + attempt.build_s
        if attempt.why is not Reason.OUT_OF_MEMORY or built_at > _built_by(reference, tracer.run.budget):
            continue
        room = room_gib(tracer.bench.device)
        if room is not None and tracer.bench.frees_gib() < WORTH_FREEING * room:
            continue
        beside = reference.plan.name
        which = f"{variant_in_a_sentence(attempt.plan.name)} with {variant_in_a_sentence(beside)} alone"
        tracer.run.progress(f"timing {which}", attempt.plan.name)
        again, found = _pair(tracer, attempt, reference, attempts[0], samples)
        attempt.no_number = again.no_number
        if attempt.no_number is None:
            attempt.ready, attempt.beside = again.ready, beside
            samples.update(found)
            tracer.prove(attempt, explain=attempt in tracer.compared(attempts, samples))


def _built_by(reference: Attempt, budget: Budget) -> float:
    """Return the clock by which a pair has to be built, each as slow as the reference."""
    cost = Cost(reference.build_s, tuple(ready.step_s for ready in reference.ready))
    return budget.build_until({"reference": cost, "other": cost})


def _pair(
    tracer: Tracer, attempt: Attempt, reference: Attempt, as_is: Attempt, samples: Samples
) -> tuple[Attempt, Samples]:
    """Free everything else, build the variant again with the reference, and time both.

    Its samples are those of the reference in the common window times the ratio of the pair.
    """
    bench, budget = tracer.bench, tracer.run.budget
    bench.let_go()
    beside, again = Attempt(reference.plan), Attempt(attempt.plan)
    for each in (beside, again):
        bench.build(each, _built_by(reference, budget))
    if again.why is Reason.OUT_OF_MEMORY:
        sentence = f"the GPU's memory is too small for it, even with {reference.plan.name} alone"
        again.no_number = NoNumber(Reason.DOES_NOT_FIT, sentence)
    elif beyond := beyond_gpu(again, [as_is, again], bench.plan, gpu_gib(bench.device)):
        bench.drop(again, beyond)
    again.no_number = again.no_number or beside.no_number
    if again.no_number:
        return again, {}
    try:
        latest = budget.rounds_latest({})
        pair = time_in_turn(tracer, (beside, again), lambda _: budget.end, latest, overtime=False)
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
