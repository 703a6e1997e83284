"""Time variants in turn, B C A C A B ..., until enough is known: all share clocks, heat and neighbors.

A block runs some steps of one variant and drops the first ones, which run with the caches and at the clocks
that the variant before left. Its figure is the median of the rest.

The GPU and the host are watched meanwhile. NVML is asked once a block, between the launch of the last step
and its end: the GPU is busy, and no step that counts waits. It ignores ``CUDA_VISIBLE_DEVICES``, so the GPU
is found by its UUID.
"""

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fp8doctor.analysis.significance import interval
from fp8doctor.examine.nvml_gpus import open_nvml
from fp8doctor.facts import NOT_RECORDED, ArmName, Health, HostLoad
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.copies.step import VariantPlan
from fp8doctor.trial.measure.attempt import Samples, full_ms

SETTLING_MS, MOST_STEPS = 150.0, 8
"""ms of steps that a variant's first block drops, and the most steps of a block. It begins with an idle GPU,
whose clocks are too high: three steps made variants 1.6% too fast, 150 ms 0.6% (visits_h100.md)."""

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

MOST_WHILE_OPEN = 4
"""Multiples of `MOST_ROUNDS` to take while the question is open: four halve the interval."""

ASKED_EACH = 5
"""Rounds between two looks at the question: an interval that is tested often leaves 1 by chance."""

SHARP = 0.005
"""Stop when half of every variant's interval is within this share of its median."""


@dataclass(frozen=True)
class Block:
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
    """When the rounds end, on ``time.monotonic``."""

    soon: float
    """From here on rounds are added only while the question is open."""
    latest: float = math.inf
    """After this not even the least rounds go on."""


def interleave(
    steps: Mapping[tuple[str, int], Callable[[], object]],
    device: torch.device,
    limits: Limits,
    look: Callable[[], None] = lambda: None,
    *,
    begin: Callable[[int], object] = lambda number: None,
    expected_ms: Mapping[tuple[str, int], float] | None = None,
    is_open: Callable[[Samples], bool] = lambda samples: False,
) -> Samples:
    """Time every step once a round, and return a sample in ms for each round.

    `LEAST_ROUNDS` are taken, and then more up to ``limits.soon`` or `MOST_ROUNDS`, unless all times are sharp
    before. From there on rounds are added while ``is_open``. No round begins that would end too late.

    Each round has an order of its own: a variant that follows one that heats the GPU finds lower clocks.
    ``begin`` is called with the round's number before each variant.
    """
    samples: Samples = {key: [] for key in steps}
    shuffle = random.Random(0).shuffle
    known_ms = dict.fromkeys(steps, 0.0) | dict(expected_ms or {})
    depths = {name: sorted(number for of, number in steps if of == name) for name, _ in steps}
    round_s, asked = 0.0, False
    for number in range(MOST_WHILE_OPEN * MOST_ROUNDS):
        began = time.monotonic()
        ends = began + round_s
        if number and ends > limits.latest:
            break
        if number >= LEAST_ROUNDS and all(
            known.high - known.low <= 2 * SHARP * known.value for known in map(interval, samples.values())
        ):
            break
        enough = number >= MOST_ROUNDS or (number >= LEAST_ROUNDS and ends > limits.soon)
        if enough and (not asked or number % ASKED_EACH == 0):
            asked = True
            if not is_open(samples):
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


def sign_is_open(samples: Samples, plan: Plan, variants: Sequence[VariantPlan]) -> bool:
    """Return whether the rounds do not tell FP8 from BF16 yet.

    FP8 is the step as it is, and the fastest of the variants that decide. False without both.
    """
    deciding = [each for each in variants if each.place.decides and each.name != ArmName.SELF_CHECK]
    times = {each.name: full_ms(plan, samples, each) for each in deciding}

    def fastest(fp8: bool) -> str | None:
        names = [each.name for each in deciding if bool(each.fp8) is fp8]
        return min(names, key=lambda name: statistics.median(times[name]), default=None)

    in_fp8, bf16 = fastest(True), fastest(False)
    if in_fp8 is None or bf16 is None:
        return False
    own = [each.name for each in deciding if each.name == ArmName.AS_IS and each.fp8]
    ratios = ([a / b for a, b in zip(times[bf16], times[name], strict=True)] for name in {in_fp8, *own})
    return any(interval(each).side == "open" for each in ratios)


PACE_LOOPS = 5000
"""Rounds of the fixed piece of Python: about 0.3 ms, which is less than most steps take."""


class Observer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = ExitStack()
        self._nvml: Any = None
        self._card: Any = None
        self._mhz: list[int] = []
        self._shares: list[float] = []
        self._looks = self._since = 0
        self._paces_ms: list[float] = []
        if device.type == "cuda":
            with suppress(Exception):  # no driver, another version than the library's, or an older torch
                self._nvml = self._open.enter_context(open_nvml())
                uuid = str(torch.cuda.get_device_properties(device).uuid)
                self._card = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

    def look(self) -> None:
        """Take one sample, of the GPU first, which is busy now."""
        if self._card is not None:
            self._looks += 1
            with suppress(self._nvml.NVMLError):
                self._mhz.append(self._nvml.nvmlDeviceGetClockInfo(self._card, self._nvml.NVML_CLOCK_SM))
            with suppress(self._nvml.NVMLError):
                used = self._nvml.nvmlDeviceGetProcessUtilization(self._card, self._since)
                latest = {each.pid: each.smUtil for each in sorted(used, key=lambda each: each.timeStamp)}
                self._since = max((each.timeStamp for each in used), default=self._since)
                if latest.pop(os.getpid(), None) is not None:  # not in a container
                    self._shares.append(float(sum(latest.values())))
        began, value = time.perf_counter(), 1
        for number in range(PACE_LOOPS):
            value = (value * 3 + number) & 0xFFFF
        self._paces_ms.append((time.perf_counter() - began) * 1e3)

    def health(self) -> Health | None:
        """Sum up the samples of the GPU; None on a CPU, not recorded without NVML."""
        unknown: Health | None = NOT_RECORDED if self._device.type == "cuda" else None
        if not self._looks:
            return unknown
        return Health(
            samples=self._looks,
            sm_clock_low_mhz=min(self._mhz, default=None),
            sm_clock_high_mhz=max(self._mhz, default=None),
            other_use_pct=max(self._shares, default=None),
        )

    def host(self) -> HostLoad:
        if not self._paces_ms:
            unknown: HostLoad = NOT_RECORDED
            return unknown
        return HostLoad(pace_low_ms=min(self._paces_ms), pace_median_ms=statistics.median(self._paces_ms))

    def close(self) -> None:
        self._card = None
        self._open.close()
