"""Trials as they were recorded on an H200, planned and interleaved for real over recorded seconds."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial import conductor
from fp8doctor.trial.copies.depth import WHOLE
from fp8doctor.trial.copies.step import Place, VariantPlan, as_it_is
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.measure.evidence import Compilations
from fp8doctor.trial.measure.memory import StepMemory
from tests.trial.decoder import CPU


@dataclass(frozen=True)
class Seen:
    """An arm as it was recorded (torch 2.11, torchao 0.18): seconds to build it, ms of a step at each cut,
    seconds of profile or proof."""

    build_s: float
    steps_ms: tuple[float, ...]
    shown_s: float
    compiles: bool = False
    base: str | None = None
    explored: bool = False
    launched: float = 0.0
    """Share of the step after which the host had launched it."""


TRIALS: dict[str, tuple[float, float, dict[str, Seen]]] = {
    "llama_8b": (
        9.4,
        3.5,
        {
            "as_is": Seen(11.6, (132.0, 277.7), 1.3, True),
            "bf16_compiled": Seen(4.4, (148.0, 326.8), 1.3, True),
            "bf16": Seen(1.7, (163.7, 371.2), 0.4),
            ArmName.SELF_CHECK: Seen(0.5, (163.7,), 0.0),
            "recipe-rowwise": Seen(18.9, (144.5, 312.8), 0.4, True, "as_is", True),
            "recipe-rowwise-with-gw-hp": Seen(18.9, (144.5, 312.8), 0.4, True, "as_is", True),
        },
    ),
    "llama_8b_float8": (
        7.3,
        0.9,
        {
            "as_is": Seen(1.6, (142.5, 360.8), 2.9),
            "bf16": Seen(0.9, (82.3, 182.6), 0.2),
            "bf16_compiled": Seen(4.5, (74.3, 156.7), 0.9, True),
            "prescribed": Seen(12.5, (65.6, 130.6), 0.9, True, "as_is"),
            ArmName.SELF_CHECK: Seen(0.3, (82.3,), 0.0),
            "recipe-rowwise": Seen(15.6, (74.7, 156.9), 0.2, True, "prescribed", True),
        },
    ),
    "lora": (
        7.6,
        1.0,
        {
            "as_is": Seen(1.5, (435.7,), 2.8),
            "bf16": Seen(0.9, (231.6,), 0.5),
            "bf16_compiled": Seen(9.7, (152.3,), 0.6, True),
            "prescribed": Seen(13.0, (109.6,), 0.5, True, "as_is"),
            ArmName.SELF_CHECK: Seen(0.9, (231.6,), 0.0),
            "adapters-to-bf16": Seen(1.4, (371.7,), 0.8, False, "as_is"),
            "compile-blocks": Seen(12.9, (143.1,), 0.3, True, "as_is"),
        },
    ),
    "flux": (
        11.8,
        0.9,
        {
            "as_is": Seen(35.1, (67.4,), 0.7, True),
            "bf16_compiled": Seen(12.5, (65.8,), 0.5, True),
            "bf16": Seen(0.4, (73.0,), 0.3),
            ArmName.SELF_CHECK: Seen(0.4, (73.0,), 0.0),
        },
    ),
    "encoder_decoder": (
        10.0,
        0.9,
        {
            "as_is": Seen(1.2, (417.4,), 3.9),
            "bf16": Seen(0.4, (90.7,), 0.5),
            "bf16_compiled": Seen(27.0, (51.7,), 0.4, True),
            "prescribed": Seen(27.0, (60.0,), 0.4, True, "as_is"),
        },
    ),
}
"""Model -> seconds before the first arm, seconds after the last proof, and the arms."""

REPORT_S = 4.0
"""Seconds from the end of a trial to that of the command: not recorded, but what is kept for them."""


class Clock:
    """A clock that only what was recorded moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class RecordedBench:
    """A bench whose builds take what they took."""

    attempts: list[Attempt]
    run: TrialRun
    seen: dict[str, Seen]
    clock: Clock
    order: list[str] = field(default_factory=list)
    """The variants that were built."""
    device = CPU
    plan = WHOLE
    guard = observer = host = SimpleNamespace(look=lambda: None)

    @property
    def built(self) -> list[Attempt]:
        return [each for each in self.attempts if each.ready]

    def build(self, attempt: Attempt, until: float) -> None:
        of, began = self.seen[attempt.plan.name], self.clock.now_s
        self.order.append(attempt.plan.name)
        self.clock.now_s += min(of.build_s, max(0.0, until - self.clock.now_s))
        attempt.build_s = self.clock.now_s - began
        if self.clock.now_s >= until:
            attempt.no_number = NoNumber(Reason.NO_TIME_LEFT, "it was given up")
            return
        attempt.ready = [
            Ready(
                step=lambda: torch.zeros(()),
                model=None,
                compiled=Compilations(graphs=int(of.compiles)),
                memory=StepMemory(0.0, 0.0, None),
                step_s=ms / 1e3,
                launched_s=of.launched * ms / 1e3,
                non_finite=None,
            )
            for ms in of.steps_ms
        ]


def place_of(name: str, seen: Seen) -> Place:
    """The variant's place, from what it was recorded as."""
    if name == ArmName.AS_IS:
        return Place.AS_IS
    if name == ArmName.PRESCRIBED:
        return Place.PLAN
    return Place.REST if seen.base else Place.OTHER_BF16


def took(
    name: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float = 60.0,
    *,
    load_s: float = 0.0,
    open_until: int = 0,
) -> tuple[dict[str, float], list[str], int]:
    """Seconds of every part, the arms that were timed, and the rounds. ``load_s`` is what the command did
    before its trial, ``open_until`` the rounds that tell FP8 from BF16. A build that takes too long is given
    up."""
    before_s, end_s, seen = TRIALS[name]

    plans = [
        VariantPlan(
            arm,
            as_it_is,
            (arm,),
            base=of.base,
            explored=of.explored,
            compiled=of.compiles,
            place=place_of(arm, of),
        )
        for arm, of in seen.items()
    ]
    command_began = clock()
    clock.now_s += load_s
    of_trial = Budget.since(command_began, budget_s)
    run = TrialRun(CPU, of_trial, own_process=True)
    bench = RecordedBench([Attempt(plan) for plan in plans], run, seen, clock)
    clock.now_s += before_s
    conductor.build(cast(Bench, bench))
    timed = [attempt for attempt in bench.attempts if attempt.no_number is None]
    parts = {"before": load_s + before_s, "arms": of_trial.elapsed_s - load_s - before_s}
    began, limits = clock.now_s, of_trial.rounds(timed)
    steps_ms = {
        (each.plan.name, number): 1e3 * ready.step_s
        for each in timed
        for number, ready in enumerate(each.ready)
    }
    monkeypatch.setattr(timer, "block_ms", lambda step, device, block, look: _block(step, block, clock))
    samples = timer.interleave(
        cast(Any, steps_ms),
        CPU,
        limits,
        expected_ms=steps_ms,
        is_open=lambda samples: len(next(iter(samples.values()), ())) < open_until,
    )
    parts["window"] = clock.now_s - began
    parts["shown"], parts["end"] = sum(seen[each.plan.name].shown_s for each in timed), end_s
    clock.now_s += parts["shown"]
    parts["report"] = REPORT_S
    return parts, [each.plan.name for each in timed], len(next(iter(samples.values()), ()))


def _block(ms: float, block: timer.Block, clock: Clock) -> float:
    """Let a block pass; its time varies, so that rounds do not end because all are known sharply."""
    clock.now_s += block.steps * ms / 1e3
    return ms + clock.now_s % 10
