"""Combine the explorations that gained, and time the combination in a final round.

The first rounds show which explorations gained beyond doubt; the total of a single one was measured there.
Several are combined and timed again next to every form of BF16 and the best of them alone, so all share
clocks and heat. The fastest becomes the prescription.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fp8doctor.analysis.arms import changes_in_bf16
from fp8doctor.analysis.significance import Interval, interval
from fp8doctor.analysis.treatment_table import family, that_help_bf16_too
from fp8doctor.facts.arm_names import BASELINES, ArmName
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.measure.attempt import Attempt, Final, Samples, full_ms, raised
from fp8doctor.trial.measure.budget import costs_of
from fp8doctor.trial.measure.memory_fit import beyond_gpu, gpu_gib
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.rounds import time_in_turn
from fp8doctor.trial.planning import together
from fp8doctor.trial.variant import VariantPlan, explores

_log = logging.getLogger("fp8doctor")


@dataclass(frozen=True)
class Window:
    """A window of the trial: the variants and their samples."""

    tracer: Tracer
    attempts: Sequence[Attempt]
    samples: Samples

    def timed(self, name: str) -> Attempt | None:
        return next(
            (
                each
                for each in self.attempts
                if each.plan.name == name and each.no_number is None and (name, 0) in self.samples
            ),
            None,
        )

    def ms(self, attempt: Attempt) -> list[float]:
        return full_ms(self.tracer.bench.plan, self.samples, attempt.plan)

    def gain(self, attempt: Attempt, over: Attempt) -> Interval:
        """Subtract a variant's time from another's, in ms, round by round."""
        return interval([a - b for a, b in zip(self.ms(over), self.ms(attempt), strict=True)])


def best_total(window: Window, against: NoNumber | None) -> Final | None:
    """Find the best prescription after the explorations; None if it stays what it is.

    ``against`` forbids more rounds.
    """
    as_is = window.timed(ArmName.AS_IS)
    base = window.timed(ArmName.PRESCRIBED) or as_is
    if as_is is None or base is None or not base.plan.fp8:
        return None
    winners = winners_of(window, base)
    alone = [(together(base.plan, [each.plan], ArmName.PRESCRIBED), each) for each in winners] + rivals_of(
        window, base
    )
    if not alone:
        return None
    plan, best = min(alone, key=lambda each: interval(window.ms(each[1])).median)
    single = Attempt(plan, best.ready, proof=best.proof)
    samples = _samples_of(window.samples, best.plan.name, ArmName.PRESCRIBED)
    if len(winners) < 2:
        return Final([single], samples)
    plan = together(base.plan, [each.plan for each in winners], ArmName.COMBINATION)
    both = Attempt(plan, no_number=against)
    if both.no_number is None:
        window.tracer.run.progress("building what gained, together", ArmName.COMBINATION)
        bench = window.tracer.bench
        costs = costs_of([*_references(window, single, both), single, replace(single, plan=plan)])
        bench.build(both, window.tracer.run.budget.build_until(costs))
        if beyond := beyond_gpu(both, [as_is, both], bench.plan, gpu_gib(bench.device)):
            bench.drop(both, beyond)
    if both.no_number is None:
        try:
            return _faster_of(window, single, both)
        except Exception as error:
            _log.debug("timing what gained raises", exc_info=True)
            window.tracer.bench.drop(both, raised(error))
    return Final([single, both], samples)


def winners_of(window: Window, base: Attempt) -> list[Attempt]:
    """Pick the explorations of ``base`` that clearly gained, the best of each family."""
    gains: dict[str, tuple[float, Attempt]] = {}
    for attempt in filter(None, (_as_a_change_of(base, each, window) for each in window.attempts)):
        gain, kind = window.gain(attempt, base), family(attempt.plan.treatments[0])
        if gain.low > 0 and (kind not in gains or gain.median > gains[kind][0]):
            gains[kind] = (gain.median, attempt)
    return [attempt for _, attempt in gains.values()]


def _as_a_change_of(base: Attempt, attempt: Attempt, window: Window) -> Attempt | None:
    """Return an exploration as a change of ``base``; None if it is none.

    A change of an exploration has to gain on top of it.
    """
    plan = attempt.plan
    below = window.timed(plan.base) if plan.base and explores(plan) and window.timed(plan.name) else None
    if below is None or below.plan.name == base.plan.name:
        return attempt if below else None
    if not explores(below.plan) or below.plan.base != base.plan.name:
        return None
    both = replace(attempt, plan=together(below.plan, [plan], plan.name))
    return both if window.gain(attempt, below).low > 0 else None


def rivals_of(window: Window, base: Attempt) -> list[tuple[VariantPlan, Attempt]]:
    """Pick single proposals that are faster beyond doubt than all together.

    If all together have no time, as when they do not fit, the step as it is counts instead.
    """
    alone = [
        each
        for each in window.attempts
        if each.plan.base == ArmName.AS_IS
        and each.plan.treatments
        and not each.plan.explored
        and each is not base
    ]
    faster = [each for each in alone if window.timed(each.plan.name) and window.gain(each, base).low > 0]
    return [(replace(each.plan, name=ArmName.PRESCRIBED), each) for each in faster]


def _faster_of(window: Window, single: Attempt, both: Attempt) -> Final:
    """Time the combination next to the best change alone, and prescribe the faster."""
    tracer, run = window.tracer, window.tracer.run
    references = _references(window, single, both)
    attempts = [*references, single, both]
    run.progress("timing what gained, together", ArmName.COMBINATION)
    until = run.budget.rounds_until(costs_of([single, both]), ())
    samples = time_in_turn(
        tracer, attempts, lambda _: until, run.budget.rounds_latest(costs_of([single, both]))
    )
    if Window(tracer, attempts, samples).gain(both, single).median > 0:
        both.plan = replace(both.plan, name=ArmName.PRESCRIBED)
        tracer.prove(both)
        if both.no_number is None:
            renamed = _samples_of(samples, ArmName.COMBINATION, ArmName.PRESCRIBED)
            return Final([*references, both], samples | renamed, timed_again=True)
        both.plan = replace(both.plan, name=ArmName.COMBINATION)
    else:
        run.progress("checking what gained, together", ArmName.COMBINATION)
        tracer.prove(both, explain=False)
    return Final(attempts, samples, timed_again=True)


def _references(window: Window, *totals: Attempt) -> list[Attempt]:
    """List every form of BF16 to time the totals with."""
    names = (*BASELINES, *_alike(window.attempts, *totals))
    return [each for name in names if (each := window.timed(name))]


def _alike(attempts: Iterable[Attempt], *totals: Attempt) -> Iterator[str]:
    """Name BF16 with the changes of a total that help it too, as `fair_bf16` does."""
    shared = {that_help_bf16_too(total.plan.treatments) for total in totals} - {frozenset()}
    plans = (each.plan for each in attempts)
    yield from (each.name for each in plans if changes_in_bf16(each.name, each.treatments) in shared)


def _samples_of(samples: Samples, name: str, renamed: str) -> Samples:
    """Copy the samples of a variant under another name."""
    return {(renamed, number): values for (each, number), values in samples.items() if each == name}
