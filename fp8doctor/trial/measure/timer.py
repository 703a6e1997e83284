"""Timing of several arms in turn, B C A C A B ..., so that clocks, heat and neighbours are shared by all.

One visit runs some steps of one arm and drops the first ones, which pay for what the arm before left in the
caches and run at the clocks that it left. The figure of a visit is the median of the rest. CUDA events time
the GPU, the clock of the host a CPU.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8doctor.analysis import significance
from fp8doctor.analysis.arms import BF16_WITH
from fp8doctor.analysis.noise import swallows_effect
from fp8doctor.analysis.significance import EVEN, Interval, interval
from fp8doctor.analysis.treatment_table import that_help_bf16_too
from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, is_conversion
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.measure.attempt import Samples, full_ms
from fp8doctor.trial.variant import ArmPlan, explores

SETTLING_MS, MOST_STEPS = 150.0, 8
"""Time of the steps that the first visit of an arm drops, one at least, and the most of them. A visit begins
with an idle GPU, which may buy clocks for what follows at the power limit: in visits of three steps six arms
of two jobs came out 1.6 % too fast in the median on an H100, 23 arms of eight jobs 0.6 % off either way
since, of two jobs with 200 ms (tests/benchmarks/results/trial_jobs_h100.md, visits_h100.md). Where so many
steps are shorter than that, the host or the memory sets the pace rather than the power."""

SETTLES_ITSELF_MS = 5 * SETTLING_MS
"""Of steps that take longer none is dropped: what settles is a fifth of one at most, so that the 1.6 % of
short visits become 0.3 % (computed). In five rounds of a Qwen2 3B whose eager FP8 takes 1.27 s (H100) those
that were dropped took a tenth of the budget."""

CHANGING_MS = 15.0
"""The same for the other cuts of the arm, which follow at once. Of steps of 1 ms the second came out 1 to 4 %
longer there than the ninth of a visit alone (a CPU)."""

KEPT_MS, KEPT = 30.0, 2
"""Time of the steps of a visit that count, up to `MOST_STEPS`, and the least number of them. The median of
two short steps varies, and more of them cost little: a choice."""

LONG_STEP_MS = 200.0
"""Of steps that take longer one counts: it outlasts what varies."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 15
"""The range of five rounds covers the true median with 94 % (1 - 2 / 2^5,
`fp8doctor.analysis.significance`); fewer do not reach 90 %, more sharpen it."""

MOST_WHILE_UNDECIDED = 4
"""Multiples of `MOST_ROUNDS` that are taken where what is asked stays undecided: four halve the interval."""

ASKED_EACH = 5
"""Rounds after which it is asked again whether the samples answer: an interval that is asked often leaves 1
by chance. Two even steps whose ratio varies by 12 % a round are told apart by more than what is even in 16 %
of such windows, asked each round in 21 %, each fifteenth in 16 %; where it varies by 5 %, in 4, 5 and 4 %
(simulated, normal noise)."""

SHARP = 0.005
"""No further round is taken when half the interval of every arm is within this share of its median."""


@dataclass(frozen=True)
class Visit:
    """The steps in a row of one arm at one cut."""

    dropped: int
    kept: int

    @property
    def steps(self) -> int:
        return self.dropped + self.kept


def visits(steps_ms: Sequence[float]) -> list[Visit]:
    """Choose the steps of an arm at each of its cuts by the time of one; 0 where it is not known yet.

    The last cut is visited first. The others follow at once, on a GPU that has settled.
    """
    waits_ms = [CHANGING_MS] * (len(steps_ms) - 1) + [SETTLING_MS]
    return [
        Visit(
            0 if ms > SETTLES_ITSELF_MS else _at_least(1, wait_ms, ms),
            1 if ms > LONG_STEP_MS else _at_least(KEPT, KEPT_MS, ms),
        )
        for wait_ms, ms in zip(waits_ms, steps_ms, strict=True)
    ]


def _at_least(least: int, together_ms: float, step_ms: float) -> int:
    """Count the steps that take so long together."""
    return max(least, min(MOST_STEPS, math.ceil(together_ms / step_ms))) if step_ms else least


def visit_ms(
    step: Callable[[], object], device: torch.device, visit: Visit, look: Callable[[], None] = lambda: None
) -> float:
    """Time the steps of a visit in a row and return the median of those that are kept, in ms.

    ``look`` is called while the GPU runs the last.
    """
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(visit.steps + 1)]  # type: ignore[no-untyped-call]
        for mark in marks[:-1]:
            mark.record()
            step()
        marks[-1].record()
        look()
        torch.cuda.synchronize(device)
        times = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]
    else:
        look()
        times = []
        for _ in range(visit.steps):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[visit.dropped :])


def interleave(
    steps: Mapping[tuple[str, int], Callable[[], object]],
    device: torch.device,
    until: Callable[[Samples], float],
    look: Callable[[], None] = lambda: None,
    *,
    soon: float = math.inf,
    latest: float = math.inf,
    more_s: float = 0.0,
    expected_ms: Mapping[tuple[str, int], float] | None = None,
    told: Callable[[Samples], bool] = lambda samples: True,
    decided: Callable[[Samples], bool] = lambda samples: True,
) -> Samples:
    """Visit every step once a round as long as the next round ends before ``until`` (``time.monotonic``), by
    what the samples say so far, or until all are known sharply.

    `LEAST_ROUNDS` are taken whatever ``until`` says, as long as the next ends before ``latest``, and one in
    any case. ``expected_ms`` says how long a step takes that was not visited yet. After ``soon``, or after
    `MOST_ROUNDS`, they go on only while ``decided`` says that the samples do not answer what is asked, each
    `ASKED_EACH` rounds.

    ``told`` says whether they answer the chief question of those, for which they go on ``more_s`` seconds
    after ``until``. When the time is up the last answer stands; it is asked then only where it never was.

    A key is an arm and the number of a cut. Each round has an order of its own: an arm that follows one that
    heats the GPU finds lower clocks, and that must not always be the same one. The cuts of an arm are visited
    together, the last first, so that the GPU settles once (`visits`).

    Returns the samples of each, in ms, one per round and all of one length.
    """
    samples: Samples = {key: [] for key in steps}
    shuffle = random.Random(0).shuffle
    known_ms = dict.fromkeys(steps, 0.0) | dict(expected_ms or {})
    arms = {arm: sorted(number for of, number in steps if of == arm) for arm, _ in steps}
    round_s, is_open = 0.0, None
    for number in range(MOST_WHILE_UNDECIDED * MOST_ROUNDS):
        began = time.monotonic()
        ends = began + round_s
        if number and ends > latest:
            break
        if number >= LEAST_ROUNDS:
            late_s = ends - until(samples)
            if late_s > more_s or all(map(_sharp, samples.values())):
                break
            again = number % ASKED_EACH == 0 and (is_open is not None or number >= MOST_ROUNDS)
            if again or (is_open is None and (late_s > 0 or ends > soon)):
                is_open = not told(samples)
                if not is_open and (late_s > 0 or decided(samples)):
                    break
            elif late_s > 0 and not is_open:
                break
        order = list(arms)
        shuffle(order)
        for arm in order:
            keys = [(arm, number) for number in arms[arm]]
            of_each = visits([known_ms[key] for key in keys])
            for key, visit in zip(reversed(keys), reversed(of_each), strict=True):
                known_ms[key] = visit_ms(steps[key], device, visit, look)
                samples[key].append(known_ms[key])
        round_s = time.monotonic() - began
    return samples


def _sharp(samples: list[float]) -> bool:
    known = interval(samples)
    return known.high - known.low <= 2 * SHARP * known.median


PRESCRIPTIONS = (ArmName.PRESCRIBED, ArmName.PRESCRIBED_AS_COMPILED, ArmName.COMBINATION)
"""Arms of which the fastest becomes the prescription."""


def is_decided(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    """Whether the rounds tell FP8 from BF16, and whether what seems to gain does."""
    gained = [gain for gain in gains(samples, plan, arms).values() if gain.median > 1 + EVEN]
    return all(gain.low > 1 for gain in gained) and all(
        map(significance.is_decided, _speedups(samples, plan, arms))
    )


def sign_is_told(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> bool:
    """Whether the verdict will tell FP8 from the best BF16, or call the two even; true of a window without
    both, which does not ask it. `is_decided` asks for more, within the time that there is.

    FP8 is the step as it is, or the fastest conversion of a model without FP8, and the prescription where
    that seems to be faster.
    """
    return not any(map(swallows_effect, _speedups(samples, plan, arms)))


def _speedups(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> Iterator[Interval]:
    """Divide the times of BF16 by those of each FP8 that the verdict holds to them."""
    times = _times(samples, plan, arms)

    def fastest(*names: str) -> str | None:
        timed = [each for each in names if each in times]
        return min(timed, key=lambda each: statistics.median(times[each]), default=None)

    if not any(each.name == ArmName.AS_IS and each.fp8 for each in arms):
        converted, bf16 = fastest(*filter(is_conversion, times)), fastest(*BASELINES)
        if converted and bf16:
            yield _ratio(times[bf16], times[converted])
        return
    bf16, prescribed = fastest(*BF16_BASELINES), fastest(*PRESCRIPTIONS)
    if bf16:
        yield _ratio(times[bf16], times[ArmName.AS_IS])
    if prescribed is None or fastest(ArmName.AS_IS, prescribed) == ArmName.AS_IS:
        return
    changes = next(each.treatments for each in arms if each.name == prescribed)
    if shared := that_help_bf16_too(changes):  # as `fp8doctor.analysis.arms.fair_bf16`
        name = BF16_WITH.get(frozenset(shared))
        bf16 = fastest(name, *BF16_BASELINES) if name in times else None
    if bf16:
        yield _ratio(times[bf16], times[prescribed])


def gains(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> dict[str, Interval]:
    """Divide the time of what each exploration changes by its own."""
    times = _times(samples, plan, arms)
    return {
        each.name: _ratio(times[each.base], times[each.name])
        for each in arms
        if explores(each) and each.base in times
    }


def _times(samples: Samples, plan: Plan, arms: Sequence[ArmPlan]) -> dict[str, list[float]]:
    return {each.name: full_ms(plan, samples, each) for each in arms if each.name != ArmName.SELF_CHECK}


def _ratio(before: Sequence[float], after: Sequence[float]) -> Interval:
    return interval([a / b for a, b in zip(before, after, strict=True)])
