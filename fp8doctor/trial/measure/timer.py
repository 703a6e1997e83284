"""Time variants in turn, B C A C A B ..., until enough is known.

All share clocks, heat and neighbors. A measurement block runs some steps of one variant and drops the first
ones, which run with the caches and at the clocks that the variant before left. Its figure is the median of
the rest. CUDA events time the GPU, the clock of the host a CPU.
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
from fp8doctor.analysis.arms import changes_in_bf16
from fp8doctor.analysis.noise import swallows_effect
from fp8doctor.analysis.significance import EVEN, Interval, interval
from fp8doctor.analysis.treatment_table import that_help_bf16_too
from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, is_conversion
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.measure.attempt import Samples, full_ms
from fp8doctor.trial.variant import VariantPlan, explores

SETTLING_MS, MOST_STEPS = 150.0, 8
"""ms of steps that a variant's first block drops, and the most steps of a block. A block begins with an idle
GPU, whose clocks are too high at the power limit: with three steps a block, six variants were 1.6% too fast,
with 150 ms 23 variants were 0.6% off (medians, H100, research/benchmarks/results/visits_h100.md)."""

SETTLES_ITSELF_MS = 5 * SETTLING_MS
"""Steps longer than this need no warm-up step: settling is at most a fifth of one, which makes 1.6% into
0.3% (computed)."""

CHANGING_MS = 15.0
"""The same for the variant's other depths, which follow at once. Of steps of 1 ms the second was 1 to 4%
longer than the ninth (a CPU)."""

KEPT_MS, KEPT = 30.0, 2
"""ms of steps that count, up to `MOST_STEPS`, and their least number. A choice: more short steps cost
little."""

LONG_STEP_MS = 200.0
"""Of longer steps one counts: it outlasts what varies."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 15
"""The range of five rounds covers the true median with 94% (1 - 2 / 2^5); fewer do not reach 90%."""

MOST_WHILE_UNDECIDED = 4
"""Multiples of `MOST_ROUNDS` to take while the question is open: four halve the interval."""

ASKED_EACH = 5
"""Rounds between two looks at the question: an interval that is tested often leaves 1 by chance. Two even
steps that vary by 12% a round differ in 16% of windows, and in 21% if tested each round (simulated)."""

SHARP = 0.005
"""Stop when half of every variant's interval is within this share of its median."""

PRESCRIPTIONS = (ArmName.PRESCRIBED, ArmName.PRESCRIBED_AS_COMPILED)
"""Variants of which the fastest becomes the prescription."""


@dataclass(frozen=True)
class Block:
    """A measurement block: the steps in a row of one variant at one depth."""

    dropped: int
    kept: int

    @property
    def steps(self) -> int:
        return self.dropped + self.kept


def blocks(steps_ms: Sequence[float]) -> list[Block]:
    """Choose a variant's block at each depth by the time of a step, or 0 if unknown.

    The last depth is timed first. The others follow at once, on a GPU that has settled.
    """
    waits_ms = [CHANGING_MS] * (len(steps_ms) - 1) + [SETTLING_MS]
    return [
        Block(
            0 if ms > SETTLES_ITSELF_MS else _at_least(1, wait_ms, ms),
            1 if ms > LONG_STEP_MS else _at_least(KEPT, KEPT_MS, ms),
        )
        for wait_ms, ms in zip(waits_ms, steps_ms, strict=True)
    ]


def _at_least(least: int, together_ms: float, step_ms: float) -> int:
    """Count the steps that take so long together."""
    return max(least, min(MOST_STEPS, math.ceil(together_ms / step_ms))) if step_ms else least


def block_ms(
    step: Callable[[], object], device: torch.device, block: Block, look: Callable[[], None] = lambda: None
) -> float:
    """Run a block, call ``look`` in its last step, and return the median in ms."""
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(block.steps + 1)]  # type: ignore[no-untyped-call]
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
        for _ in range(block.steps):
            began = time.perf_counter()
            step()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[block.dropped :])


@dataclass(frozen=True)
class Limits:
    """When a window ends, on ``time.monotonic``."""

    until: float
    """End of the time for rounds."""
    soon: float = math.inf
    """From here on rounds are added only while the question is open."""
    latest: float = math.inf
    """After this not even the least rounds go on."""
    overtime_s: float = 0.0
    """Seconds beyond ``until`` while FP8 vs. BF16 is open."""


def interleave(
    steps: Mapping[tuple[str, int], Callable[[], object]],
    device: torch.device,
    limits: Limits,
    look: Callable[[], None] = lambda: None,
    *,
    begin: Callable[[int], object] = lambda number: None,
    expected_ms: Mapping[tuple[str, int], float] | None = None,
    sign_known: Callable[[Samples], bool] = lambda samples: True,
    decided: Callable[[Samples], bool] = lambda samples: True,
) -> Samples:
    """Time every step once a round, and return a sample in ms for each round.

    `LEAST_ROUNDS` are taken, and then more up to ``limits.soon`` or `MOST_ROUNDS`, unless all times are sharp
    before. From there on rounds are added while ``decided`` denies, and after ``limits.until`` while
    ``sign_known`` does. No round begins that would end too late.

    Each round has an order of its own: a variant that follows one that heats the GPU finds lower clocks.
    ``begin`` is called with the round's number before each variant.
    """
    samples: Samples = {key: [] for key in steps}
    shuffle = random.Random(0).shuffle
    known_ms = dict.fromkeys(steps, 0.0) | dict(expected_ms or {})
    depths = {name: sorted(number for of, number in steps if of == name) for name, _ in steps}
    round_s, sign_open = 0.0, None
    for number in range(MOST_WHILE_UNDECIDED * MOST_ROUNDS):
        began = time.monotonic()
        ends = began + round_s
        if number and ends > limits.latest:
            break
        if number >= LEAST_ROUNDS:
            late_s = ends - limits.until
            if late_s > limits.overtime_s or all(map(_sharp, samples.values())):
                break
            if late_s > 0 or ends > limits.soon or number >= MOST_ROUNDS:
                if sign_open is None or number % ASKED_EACH == 0:
                    sign_open = not sign_known(samples)
                    if not sign_open and decided(samples):
                        break
                if late_s > 0 and not sign_open:
                    break
        order = list(depths)
        shuffle(order)
        for name in order:
            keys = [(name, depth) for depth in depths[name]]
            of_each = blocks([known_ms[key] for key in keys])
            begin(number)
            for key, block in zip(reversed(keys), reversed(of_each), strict=True):
                known_ms[key] = block_ms(steps[key], device, block, look)
                samples[key].append(known_ms[key])
        round_s = time.monotonic() - began
    return samples


def _sharp(samples: list[float]) -> bool:
    known = interval(samples)
    return known.high - known.low <= 2 * SHARP * known.median


def is_decided(samples: Samples, plan: Plan, variants: Sequence[VariantPlan]) -> bool:
    """Return whether the rounds tell FP8 from BF16, and confirm what seems to gain."""
    gained = [gain for gain in gains(samples, plan, variants).values() if gain.median > 1 + EVEN]
    return all(gain.low > 1 for gain in gained) and all(
        map(significance.is_decided, _speedups(samples, plan, variants))
    )


def sign_is_known(samples: Samples, plan: Plan, variants: Sequence[VariantPlan]) -> bool:
    """Return whether the verdict will tell FP8 from BF16, or call the two even.

    FP8 is the step as it is, or the fastest conversion of a model without FP8, and the prescription if that
    seems to be faster. True without both. `is_decided` asks for more, within the time that there is.
    """
    return not any(map(swallows_effect, _speedups(samples, plan, variants)))


def _speedups(samples: Samples, plan: Plan, variants: Sequence[VariantPlan]) -> Iterator[Interval]:
    """Divide the times of BF16 by those of each FP8 that the verdict compares with it."""
    times = _times(samples, plan, variants)

    def fastest(*names: str) -> str | None:
        timed = [each for each in names if each in times]
        return min(timed, key=lambda each: statistics.median(times[each]), default=None)

    if not any(each.name == ArmName.AS_IS and each.fp8 for each in variants):
        converted, bf16 = fastest(*filter(is_conversion, times)), fastest(*BASELINES)
        if converted and bf16:
            yield _ratio(times[bf16], times[converted])
        return
    bf16, prescribed = fastest(*BF16_BASELINES), fastest(*PRESCRIPTIONS)
    if bf16:
        yield _ratio(times[bf16], times[ArmName.AS_IS])
    if prescribed is None or fastest(ArmName.AS_IS, prescribed) == ArmName.AS_IS:
        return
    changes = next(each.treatments for each in variants if each.name == prescribed)
    if shared := that_help_bf16_too(changes):  # as `fp8doctor.analysis.arms.fair_bf16`
        alike = [each.name for each in variants if changes_in_bf16(each.name, each.treatments) == shared]
        bf16 = fastest(*alike, *BF16_BASELINES) if times.keys() & {*alike} else None
    if bf16:
        yield _ratio(times[bf16], times[prescribed])


def gains(samples: Samples, plan: Plan, variants: Sequence[VariantPlan]) -> dict[str, Interval]:
    """Divide the time of each exploration's base by its own."""
    times = _times(samples, plan, variants)
    return {
        each.name: _ratio(times[each.base], times[each.name])
        for each in variants
        if explores(each) and each.base in times
    }


def _times(samples: Samples, plan: Plan, variants: Sequence[VariantPlan]) -> dict[str, list[float]]:
    return {each.name: full_ms(plan, samples, each) for each in variants if each.name != ArmName.SELF_CHECK}


def _ratio(before: Sequence[float], after: Sequence[float]) -> Interval:
    return interval([a / b for a, b in zip(before, after, strict=True)])
