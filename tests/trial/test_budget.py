"""The budget holds for what was recorded on an H200: real planning and interleaving over recorded seconds, on
a clock of their own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.examine import examine
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial import admission, budget_for, conductor
from fp8doctor.trial.copies.depth import Cut, Plan
from fp8doctor.trial.measure import ahead, bench, budget, timer, window
from fp8doctor.trial.measure.ahead import Nobody, Work, patience_s
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import STRETCHED, Budget, Cost, expected
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.measure.window import time_in_turn
from fp8doctor.trial.variant import ArmPlan, Variant, as_it_is, explores
from tests.trial.decoder import Decoder, job

CPU = torch.device("cpu")


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
    fp8: bool | None = None
    """Where None, compiling FP8 is expected to take no longer than compiling BF16."""


TRIALS: dict[str, tuple[float, float, dict[str, Seen]]] = {
    "llama_8b": (
        9.4,
        3.5,
        {
            "as_is": Seen(11.6, (132.0, 277.7), 1.3, True),
            "bf16": Seen(1.7, (163.7, 371.2), 0.4),
            "bf16_compiled": Seen(4.4, (148.0, 326.8), 1.3, True),
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
    "few_tokens": (
        9.2,
        1.4,
        {
            "as_is": Seen(11.0, (648.8,), 4.8, True),
            "bf16": Seen(2.4, (656.9,), 2.8),
            "bf16_compiled": Seen(3.1, (385.4,), 2.2, True),
            ArmName.SELF_CHECK: Seen(2.2, (656.9,), 0.0),
            "recipe-rowwise": Seen(13.2, (722.6,), 2.8, True, "as_is", True),
        },
    ),
    "llama_eager_attention": (
        2.9,
        0.8,
        {
            "as_is": Seen(14.2, (182.1,), 0.8, True),
            "bf16": Seen(1.2, (358.7,), 0.5),
            "bf16_compiled": Seen(4.1, (198.0,), 0.7, True),
            "prescribed": Seen(8.5, (117.6,), 0.6, True, "as_is"),
            ArmName.SELF_CHECK: Seen(1.1, (358.7,), 0.0),
            "keep-in-bf16": Seen(9.0, (110.0,), 0.3, True, "prescribed", True),
        },
    ),
    "mixtral": (
        8.0,
        1.0,
        {
            "as_is": Seen(0.5, (160.4,), 1.7, fp8=True),
            "bf16": Seen(0.5, (128.1,), 0.4, fp8=False),
            "bf16_compiled": Seen(6.6, (88.0,), 0.6, True, fp8=False),
            ArmName.SELF_CHECK: Seen(0.5, (128.1,), 0.0, fp8=False),
            "prescribed": Seen(11.2, (88.8,), 0.6, True, "as_is", fp8=True),
            "recipe-rowwise": Seen(17.0, (88.8,), 0.3, True, "prescribed", True, fp8=True),
            "recipe-rowwise-with-gw-hp": Seen(17.0, (88.8,), 0.3, True, "prescribed", True, fp8=True),
        },
    ),
    "flux": (
        11.8,
        0.9,
        {
            "as_is": Seen(35.1, (67.4,), 0.7, True, fp8=True),
            "bf16": Seen(0.4, (73.0,), 0.3, fp8=False),
            "bf16_compiled": Seen(12.5, (65.8,), 0.5, True, fp8=False),
            ArmName.SELF_CHECK: Seen(0.4, (73.0,), 0.0, fp8=False),
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
    "flux_like": (
        11.8,
        1.2,
        {
            "as_is": Seen(35.1, (67.4,), 0.7, True),
            "bf16": Seen(0.4, (73.0,), 0.3),
            "bf16_compiled": Seen(12.5, (65.8,), 0.5, True),
            ArmName.SELF_CHECK: Seen(0.4, (73.0,), 0.0),
        },
    ),
}
"""Model -> seconds before the first arm, seconds after the last proof, and the arms. The recipes of the
Mixtral were left out: their seconds are `budget.DEARER_RECIPE` times those of what they change."""

CACHED = 0.25
"""Time to build what is in the compiler's caches / to build it: 0.13 to 0.24 were seen (H200, torch 2.11)."""


class Clock:
    """A clock that only what was recorded moves."""

    now_s = 1000.0
    for_numerics_s = 0.0
    """What the numerics have when everything before them is done."""

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (budget, timer, conductor, admission, ahead, window):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    return clock


NOT_BEGUN_S = 1000.0


class Others(Nobody):
    """Compile arms on the clock: each takes so many seconds, from the first arm of the trial on, or so much
    later. What takes longer than `NOT_BEGUN_S` is never begun."""

    def __init__(self, clock: Clock, arms_s: Mapping[str, float], late_s: float = 0.0) -> None:
        self._clock, self._arms_s, self._began = clock, arms_s, clock.now_s + late_s
        self._passed: set[str] = set()

    def take(self, work: Work, patience_s: float | None) -> float | None:
        assert patience_s is not None
        if work[0] in self.begun():
            self._clock.now_s += min(patience_s, self._until(self._arms_s[work[0]]) - self._clock())
        return self.took_s(work[0])

    def pass_by(self, arm: str, least_s: float) -> None:
        if self._clock() - self._began < least_s:
            self._passed.add(arm)

    def begun(self) -> frozenset[str]:
        return frozenset(arm for arm in self.under_way() if self._arms_s[arm] < NOT_BEGUN_S)

    def under_way(self) -> frozenset[str]:
        return frozenset(self._arms_s) - self._passed - self._done()

    def took_s(self, arm: str) -> float | None:
        return self._arms_s[arm] if arm in self._done() else None

    def _done(self) -> frozenset[str]:
        return frozenset(
            arm for arm, seconds in self._arms_s.items() if self._until(seconds) <= self._clock()
        )

    def wait_for_one(self, arms: Collection[str], timeout_s: float) -> frozenset[str]:
        first = min(self._until(self._arms_s.get(arm, 0.0)) for arm in arms)
        self._clock.now_s += max(0.0, min(first - self._clock(), timeout_s))
        return frozenset(arms) - self.under_way()

    def _until(self, seconds: float) -> float:
        return self._began + seconds


def took(
    name: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float = 60.0,
    latest: float | None = None,
    ahead_s: Mapping[str, float] | None = None,
    *,
    late_s: float = 0.0,
    stretches: bool = False,
    told_at: int = 0,
) -> tuple[dict[str, float], list[str], int]:
    """Seconds of every part, the arms that were timed, and the rounds. ``ahead_s`` is what others take to
    compile arms meanwhile, from ``late_s`` after the first arm on, ``told_at`` the rounds that tell FP8 from
    BF16."""
    before_s, end_s, seen = TRIALS[name]

    def build(attempt: Attempt, until: float) -> None:
        of, began = seen[attempt.plan.name], clock.now_s
        ahead_by_s = others.take((attempt.plan.name, 0), patience_s(until))
        share = 1.0 if ahead_by_s is None else CACHED
        clock.now_s += share * of.build_s
        attempt.build_s = clock.now_s - began
        attempt.ready = [
            SimpleNamespace(
                step_s=ms / 1e3,
                compiled=SimpleNamespace(graphs=int(of.compiles), from_caches=False),
                warm_up_s=ahead_by_s or 0.0,
            )
            for ms in of.steps_ms
        ]  # type: ignore[misc]

    def visit(ms: float, device: torch.device, visit: timer.Visit, look: Callable[[], None]) -> float:
        clock.now_s += visit.steps * ms / 1e3
        return ms + clock.now_s % 10  # varies, so that rounds do not end because all are known sharply

    monkeypatch.setattr(timer, "visit_ms", visit)
    plans = [
        ArmPlan(arm, as_it_is, (arm,), of.fp8, of.base, explored=of.explored, compiled=of.compiles)
        for arm, of in seen.items()
    ]
    attempts, bench, of_trial = (
        [Attempt(plan) for plan in plans],
        SimpleNamespace(
            build=build, device=CPU, frees_gib=lambda: 0.0, plan=Plan((), (Cut({}),)), as_one=False
        ),
        Budget(budget_s, clock(), stretches=stretches),
    )
    clock.now_s += before_s
    others = Others(clock, ahead_s or {}, late_s)
    conductor._build(bench, attempts, TrialRun(torch.device("cpu"), of_trial, ahead=others))  # type: ignore[arg-type]
    timed = [attempt for attempt in attempts if attempt.no_number is None]
    costs, explored = (
        admission.costs_of(timed),
        [each.plan.name for each in timed if explores(each.plan)],
    )
    parts = {"before": before_s, "arms": of_trial.spent_s - before_s}
    steps: Any = {
        (arm, number): ms
        for arm, cost in costs.items()
        for number, ms in enumerate(1e3 * step for step in cost.steps_s)
    }
    interleave_arms = lambda bench, timed, until, last, soon, more_s: timer.interleave(  # noqa: E731
        steps,
        CPU,
        until,
        soon=soon,
        latest=last if latest is None else of_trial.began + latest,
        more_s=more_s,
        expected_ms=steps,
        told=lambda samples: len(next(iter(samples.values()))) >= told_at,
    )
    monkeypatch.setattr(window, "interleave_arms", interleave_arms)
    tracer, began = Tracer(bench, TrialRun(CPU, of_trial)), of_trial.spent_s  # type: ignore[arg-type]
    samples = time_in_turn(
        tracer,
        timed,
        lambda samples: of_trial.window_until(costs, explored),
        of_trial.window_latest(costs),
    )
    parts["window"] = of_trial.spent_s - began
    parts["shown"], parts["end"] = sum(seen[arm].shown_s for arm in costs), end_s
    clock.now_s += parts["shown"]
    clock.for_numerics_s = max(0.0, tracer.run.budget.numerics_until() - clock())
    return parts, list(costs), len(next(iter(samples.values())))


@pytest.mark.parametrize(
    ("name", "most_s", "left_out"),
    [
        ("llama_8b", 60, {"recipe-rowwise", "recipe-rowwise-with-gw-hp"}),
        ("llama_8b_float8", 60, {"recipe-rowwise"}),
        ("lora", 61, {"compile-blocks"}),
        ("few_tokens", 63, {"recipe-rowwise"}),
        ("llama_eager_attention", 60, {"keep-in-bf16"}),
        ("mixtral", 60, {"recipe-rowwise", "recipe-rowwise-with-gw-hp"}),
        ("flux", 70, set()),
        ("encoder_decoder", 75, {"prescribed"}),  # which compiles for 27 s, as BF16 did before it
    ],
)
def test_what_was_recorded_keeps_the_budget(
    name: str, most_s: float, left_out: set[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, timed, rounds = took(name, clock, monkeypatch)
    assert sum(parts.values()) <= most_s, parts
    assert set(TRIALS[name][2]) - set(timed) == left_out
    assert rounds >= timer.LEAST_ROUNDS


@pytest.mark.parametrize(
    ("name", "budget_s", "ahead_s", "left_out"),
    [
        ("lora", 72.0, {"compile-blocks": 13.0}, set()),
        ("lora", 66.0, {"compile-blocks": 300.0}, {"compile-blocks"}),
        ("lora", 80.0, {"compile-blocks": 300.0}, set()),
        ("llama_eager_attention", 60.0, {"prescribed": 9.0, "keep-in-bf16": 24.0}, set()),
        ("encoder_decoder", 60.0, {"prescribed": 28.0}, set()),
        (
            "mixtral",
            60.0,
            {"prescribed": 15.0, "recipe-rowwise": 22.0, "recipe-rowwise-with-gw-hp": 22.0},
            set(),
        ),
        ("flux", 60.0, {"bf16_compiled": 20.0}, set()),
        ("llama_8b", 90.0, {"recipe-rowwise": 32.0, "recipe-rowwise-with-gw-hp": 19.0}, set()),
        ("llama_8b", 90.0, {}, {"recipe-rowwise-with-gw-hp"}),
        (
            "llama_8b",
            85.0,
            {"recipe-rowwise": 50.0, "recipe-rowwise-with-gw-hp": 2 * NOT_BEGUN_S},
            {"recipe-rowwise-with-gw-hp"},
        ),
        ("llama_8b", 110.0, {"recipe-rowwise": 32.0, "recipe-rowwise-with-gw-hp": 2 * NOT_BEGUN_S}, set()),
    ],
)
def test_what_others_compile_meanwhile_is_asked_when_they_have_done_it(
    name: str,
    budget_s: float,
    ahead_s: dict[str, float],
    left_out: set[str],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, timed, rounds = took(name, clock, monkeypatch, budget_s, ahead_s=ahead_s)
    assert set(TRIALS[name][2]) - set(timed) == left_out
    within = budget.WITHIN if name == "encoder_decoder" else budget.ASKED_WITHIN
    assert sum(parts.values()) <= within * budget_s, parts
    assert rounds >= timer.LEAST_ROUNDS


@pytest.mark.parametrize(("late_s", "arms_s"), [(0.0, 8.1 + 4.9 + 2.8), (6.0, 8.1 + 11.2)])
def test_what_others_began_only_now_the_trial_compiles_itself(
    late_s: float, arms_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the variant with all fixes 8.1 s after the first arm: others that need 13 s for it and
    began 6 s late are waited for in vain."""
    monkeypatch.setitem(
        TRIALS, "mixtral", (*TRIALS["mixtral"][:2], dict(list(TRIALS["mixtral"][2].items())[:5]))
    )
    parts, timed, _ = took("mixtral", clock, monkeypatch, ahead_s={"prescribed": 13.0}, late_s=late_s)
    assert "prescribed" in timed
    assert parts["arms"] == pytest.approx(arms_s)


def test_who_takes_too_long_is_not_waited_for_once_more(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last moment to compile it without others is when the trial begins to."""
    alone, beside = (
        took("llama_8b", clock, monkeypatch, 85.0, ahead_s=ahead_s)
        for ahead_s in (
            {"recipe-rowwise": 2 * NOT_BEGUN_S, "recipe-rowwise-with-gw-hp": 2 * NOT_BEGUN_S},
            {"recipe-rowwise": 300.0, "recipe-rowwise-with-gw-hp": 2 * NOT_BEGUN_S},
        )
    )
    assert beside[1] == alone[1]
    assert sum(beside[0].values()) <= budget.ASKED_WITHIN * 85.0


@pytest.mark.parametrize("budget_s", [80.0, 130.0])
def test_who_takes_too_long_for_what_is_needed_costs_no_other_variant(
    budget_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is waited for in vain is no more than what it could have saved, and is no part of what the variant
    cost, by which the recipes are estimated."""
    alone, beside = (
        took("mixtral", clock, monkeypatch, budget_s, ahead_s=ahead_s)
        for ahead_s in ({}, {"prescribed": 300.0})
    )
    assert beside[1] == alone[1]
    expected_s = budget.DEARER_FP8 * 6.6
    assert beside[0]["arms"] - alone[0]["arms"] == pytest.approx((1 - budget.AHEAD_SHARE) * expected_s)


def test_what_others_compiled_is_expected_to_take_the_trial_no_longer_than_its_own_caches() -> None:
    cost = Cost(20.0, (0.1,), True, True)
    assert budget.ahead_of(cost, 10.0).build_s == pytest.approx(0.3 * 10.0 + 0.3)
    assert budget.ahead_of(cost, 90.0).build_s == pytest.approx(0.3 * 20.0 + 0.3)


@pytest.mark.parametrize(("stretches", "left_out"), [(False, {"prescribed"}), (True, set())])
def test_what_a_report_cannot_do_without_stretches_a_budget_that_nobody_asked_for(
    stretches: bool, left_out: set[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, timed, rounds = took("encoder_decoder", clock, monkeypatch, stretches=stretches)
    assert set(TRIALS["encoder_decoder"][2]) - set(timed) == left_out
    assert sum(parts.values()) <= (budget.STRETCHED if stretches else budget.WITHIN) * 60
    assert rounds >= timer.LEAST_ROUNDS


def test_nothing_else_stretches_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    of_8b, stretched = (
        took("llama_8b", clock, monkeypatch, stretches=stretches) for stretches in (False, True)
    )
    assert stretched[1] == of_8b[1]
    assert sum(stretched[0].values()) == pytest.approx(sum(of_8b[0].values()))


@pytest.mark.parametrize(
    ("stretches", "told_at", "rounds", "most_s"),
    [
        (True, 5, 5, 70),
        (True, 6, 9, 75),
        (True, 999, 9, 75),
        (False, 999, 26, 75),
    ],
)
def test_an_open_sign_prolongs_a_trial_whose_window_began_late(
    stretches: bool, told_at: int, rounds: int, most_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a slow host: the step as it is compiled for 35 of 60 s, and five rounds told nothing."""
    parts, _, taken = took("flux_like", clock, monkeypatch, stretches=stretches, told_at=told_at)
    assert taken == rounds
    assert sum(parts.values()) <= most_s, parts
    assert clock.for_numerics_s > 0, "they are not kept time for here, and the end is"


def test_what_follows_a_prolonged_window_has_its_time(clock: Clock) -> None:
    of = Budget(60.0, clock(), stretches=True)
    assert of.open_sign_s == 15.0
    clock.now_s += 70.0
    late = of.after_window(until=1040.0, began=1055.0, rounds=15)
    assert late.prolonged_s == pytest.approx(10.0), "five of fifteen rounds it had in any case"
    assert late.open_sign_s == pytest.approx(5.0)
    assert late.end == pytest.approx(1070.0)
    assert late.build_until({}) == pytest.approx(1075.0 - of.closing_s())
    assert late.numerics_until() == pytest.approx(1075.0 - budget.CLOSING_S)
    assert of.after_window(until=1065.0, began=1020.0, rounds=15).prolonged_s == pytest.approx(5.0)
    assert of.after_window(until=1090.0, began=1020.0, rounds=15) == of
    assert of.after_window(until=1000.0, began=1069.0, rounds=3) == of
    assert late.final_fits({}, [], 68.7)
    assert not late.final_fits({}, [], 68.9)


def test_an_arm_that_raises_in_a_prolonged_window_costs_what_follows_no_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others begin anew, and the window before theirs went on for the same sign."""
    noise = random.Random(0)

    def ticking(raises_at: float) -> Callable[[Variant], Variant]:
        def make(variant: Variant) -> Variant:
            forward = variant.model.forward

            def slow(tokens: torch.Tensor) -> torch.Tensor:
                clock.now_s += noise.uniform(0.1, 0.3)
                if clock() > raises_at:
                    raise RuntimeError("planted")
                return forward(tokens)

            variant.model.forward = slow  # type: ignore[method-assign]
            return variant

        return make

    monkeypatch.setattr(window, "sign_is_told", lambda *known: False)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=clock))
    of, raises_at = Budget(60.0, clock(), stretches=True), 1065.0
    laid_out = bench.Bench(job(model=Decoder(1).bfloat16()), [], CPU)
    attempts = [
        Attempt(ArmPlan("as_is", ticking(math.inf), fp8=True)),
        Attempt(ArmPlan("bf16", ticking(math.inf), fp8=False)),
        Attempt(ArmPlan("raises", ticking(raises_at), ("x",), base="as_is")),
    ]
    for attempt in attempts:
        laid_out.build(attempt)
    clock.now_s = 1050.0
    until = of.window_until(admission.costs_of(attempts), [])
    tracer = Tracer(laid_out, TrialRun(CPU, of))
    samples = conductor._samples(attempts, tracer)
    laid_out.close()
    assert {arm for arm, _ in samples} == {"as_is", "bf16"}
    assert raises_at < clock() <= of.began + STRETCHED * of.seconds
    least_s = 2 * timer.LEAST_ROUNDS * 3 * 3 * 0.3  # of both windows, which they have in any case
    assert tracer.run.budget.prolonged_s >= clock() - until - least_s


def test_an_open_sign_overruns_no_bound(clock: Clock) -> None:
    for prolonged_s in (12.0, 55.0):
        of = replace(Budget(60.0, clock(), stretches=True), prolonged_s=prolonged_s)
        assert of.build_until({}) == pytest.approx(1075.0 - of.closing_s())
        assert of.end == pytest.approx(min(1060.0 + prolonged_s, 1075.0))
        assert of.open_sign_s == pytest.approx(max(0.0, 15.0 - prolonged_s))


def test_the_screen_says_what_is_waited_for(clock: Clock) -> None:
    """The arm that was built last is not what takes the time."""
    said: list[tuple[str, str | None]] = []
    others = Others(clock, {"a": 9.0, "b": 20.0})
    of = TrialRun(CPU, Budget(60.0, clock()), lambda *doing: said.append(doing), ahead=others)
    assert admission.wait_for_one(["a", "b"], clock() + 30.0, of) == {"a"}
    assert admission.wait_for_one(["b"], clock() - 1.0, of) == frozenset()
    assert said == [("waiting for variants that are compiled beside the trial", None)]
    assert clock() == 1009.0


def test_with_twice_the_budget_everything_is_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, timed, _ = took("llama_8b", clock, monkeypatch, budget_s=120)
    assert "recipe-rowwise" in timed
    assert sum(parts.values()) <= 120


def test_least_rounds_end_at_the_latest_and_one_is_taken_in_any_case(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert took("llama_8b", clock, monkeypatch, latest=42.0)[2] == 3
    assert took("llama_8b", clock, monkeypatch, latest=0.0)[2] == 1


COSTS = {
    "as_is": Cost(1.0, (0.1, 0.2)),
    "bf16": Cost(0.5, (0.1, 0.3)),
    "bf16_compiled": Cost(4.0, (0.1, 0.25), True),
}


@pytest.mark.parametrize(
    ("name", "compiles", "fp8", "cost"),
    [
        ("arm", False, False, Cost(1.0, (0.1, 0.2))),
        ("arm", True, False, Cost(4.0, (0.1, 0.2), True)),
        ("arm", True, True, Cost(10.0, (0.1, 0.2), True, True)),
        ("recipe-rowwise", True, True, Cost(15.0, (0.1, 0.2), True, True)),
    ],
)
def test_an_arm_is_expected_to_cost_what_it_changes_or_the_dearest_compilation(
    name: str, compiles: bool, fp8: bool, cost: Cost
) -> None:
    assert expected(COSTS, "as_is", name=name, compiles=compiles, fp8=fp8) == cost
    assert expected(COSTS, "was not built", name=name, compiles=compiles, fp8=fp8) == cost
    assert expected({}, "as_is", name=name, compiles=compiles, fp8=fp8) is None


FP8 = Cost(11.0, (0.1, 0.2), compiles=True, fp8=True)


def test_a_compilation_of_fp8_tells_more_than_one_of_bf16() -> None:
    costs = {"as_is": FP8, "bf16_compiled": COSTS["bf16_compiled"]}
    assert expected(costs, "as_is", name="arm", compiles=True, fp8=True) == FP8
    in_bf16 = expected(costs, "bf16_compiled", name="arm", compiles=True, fp8=False)
    assert in_bf16 == Cost(4.0, (0.1, 0.25), True), "what FP8 took says nothing of it"


def test_bf16_is_expected_to_compile_in_less_than_fp8_did() -> None:
    """Of a step whose own compilation took 35 s, that of BF16 took 12.5 (a small Flux, H200, torch 2.11)."""
    in_bf16 = expected({"as_is": replace(FP8, build_s=36.0)}, None, name="a", compiles=True, fp8=False)
    assert in_bf16 == Cost(14.4, (0.1, 0.2), True)


def test_the_copy_of_the_check_is_expected_to_cost_what_eager_bf16_did() -> None:
    """However long the step as it is compiled. It has one cut."""
    costs = {"as_is": replace(FP8, build_s=36.0), "bf16": Cost(0.5, (0.1, 0.3))}
    found = expected(costs, None, name=ArmName.SELF_CHECK, compiles=False, fp8=False)
    assert found == Cost(0.5, (0.1,))


def test_the_second_recipe_is_expected_to_cost_what_the_first_did() -> None:
    costs = {"as_is": FP8, "recipe-rowwise": replace(FP8, build_s=18.0)}
    second = expected(costs, "as_is", name="recipe-rowwise-with-gw-hp", compiles=True, fp8=True)
    assert second == replace(FP8, build_s=18.0)


def test_compiling_blocks_costs_a_part_of_what_is_compiled_as_one() -> None:
    as_one = {"as_is": Cost(30.0, (0.04,), True), "bf16": Cost(0.5, (0.04,))}
    assert expected(as_one, "as_is", name="compile-blocks", compiles=True) == Cost(
        9.0, (0.04,), True, by_block=True
    )
    assert expected(COSTS, "as_is", name="compile-blocks", compiles=True) == Cost(4.0, (0.1, 0.2), True), (
        "an eager base tells nothing of it"
    )


def test_a_recipe_by_block_costs_what_blocks_cost() -> None:
    """However long the graph of the step as it is compiled."""
    blocks = Cost(10.0, (0.04,), True, True, by_block=True)
    costs = {"as_is": Cost(94.0, (0.04,), True, True), "compile-blocks": blocks}
    found = expected(costs, "compile-blocks", name="recipe-tensorwise", compiles=True, fp8=True)
    assert found == replace(blocks, build_s=15.0)
    last = expected(
        {**costs, "recipe-tensorwise": replace(blocks, build_s=12.0)},
        "compile-blocks",
        name="recipe-rowwise-with-gw-hp",
        compiles=True,
        fp8=True,
    )
    assert last == replace(blocks, build_s=12.0)
    assert expected(costs, "as_is", name="checkpointing-off", compiles=True, fp8=True) == costs["as_is"]


def test_an_arm_fits_when_its_build_the_least_window_and_all_that_follows_do() -> None:
    least = timer.LEAST_ROUNDS
    # the shallow cuts for three steps; the deep ones, of which the first is no long step, for two and three
    window = least * (3 * 0.1 + 2 * 0.3 + 3 * 0.1 + 3 * 0.2)
    two = {"as_is": Cost(1.0, (0.1, 0.2))}
    profiles = (2 * 0.3 + 6 * 0.3) + (2 * 0.3 + 6 * 0.4)
    for numerics, noted_s, closing_s in ((False, 0.0, 1.2), (True, 0.0, 3.0), (True, 3.0, 6.0)):
        of = Budget(60.0, 0.0, numerics, noted_s)
        spent = 60 - 0.5 - window - profiles - closing_s
        for within in (1.0, 1.05, 1.25):
            begun = spent + (within - 1) * 60
            assert of.fits(Cost(0.5, (0.1, 0.3)), "bf16", two, begun - 0.01, within=within)
            assert not of.fits(Cost(0.5, (0.1, 0.3)), "bf16", two, begun + 0.01, within=within)


def test_the_copy_of_the_check_is_not_proven() -> None:
    with_copy = {**COSTS, ArmName.SELF_CHECK: Cost(0.1, (0.1,))}
    assert Budget(60.0, 0.0).after_window_s(with_copy) == Budget(60.0, 0.0).after_window_s(COSTS)
    other = {**COSTS, "another": Cost(0.1, (0.1,))}
    assert Budget(60.0, 0.0).after_window_s(other) == pytest.approx(
        Budget(60.0, 0.0).after_window_s(COSTS) + 0.3
    )


def test_a_window_of_what_gained_is_kept_free_where_two_were_explored() -> None:
    of, costs = Budget(60.0, 0.0), {**COSTS, "a": Cost(7.0, (0.1, 0.1)), "b": Cost(2.0, (0.1, 0.1))}
    assert of.window_until(costs, ["a"]) == of.window_until(costs, []) == 60 - of.after_window_s(costs)
    final = (
        7.0
        + timer.LEAST_ROUNDS * budget.round_s([*COSTS.values(), costs["a"], costs["b"]])
        + 2 * budget.profile_s(costs["a"])
    )
    assert of.window_until(costs, ["a", "b"]) == pytest.approx(60 - of.after_window_s(costs) - final)
    assert of.final_fits(costs, ["a", "b"], 60 - 1.2 - final - 0.01)
    assert not of.final_fits(costs, ["a", "b"], 60 - 1.2 - final + 0.01)


def test_a_late_window_and_late_numerics_have_a_share(clock: Clock) -> None:
    of = Budget(60.0, clock(), numerics=True)
    assert of.window_latest({}) == pytest.approx(clock() + 75 - of.closing_s())
    assert of.window_latest(COSTS) == pytest.approx(clock() + 75 - of.after_window_s(COSTS))
    assert of.numerics_until() == clock() + 60
    clock.now_s += 69
    assert of.numerics_until() == pytest.approx(clock() + 4.8)
    clock.now_s += 61
    assert of.window_latest({}) == pytest.approx(clock() + 7.2)
    assert of.numerics_until() == pytest.approx(clock() - 130 + 75 - budget.CLOSING_S)


@pytest.mark.parametrize(("budget_s", "noted_s"), [(60.0, 3.5), (10.0, 3.5), (3.0, 0.0)])
def test_what_is_looked_at_after_late_numerics_ends_within_the_bound(
    budget_s: float, noted_s: float, clock: Clock
) -> None:
    of = Budget(budget_s, clock(), numerics=True, noted_s=noted_s)
    for spent in (0.5, 1.0, 1.2, 1.25):
        clock.now_s = of.began + spent * budget_s
        ends = of.numerics_until() + noted_s + min(budget.CLOSING_S, 0.05 * budget_s)
        assert ends <= of.began + budget.WITHIN * budget_s + 1e-6


arm_costs = st.builds(
    Cost,
    st.floats(0, 90),
    st.tuples(st.floats(1e-3, 0.5), st.floats(1e-3, 0.5)),
    st.booleans(),
    st.booleans(),
)


@given(
    st.lists(st.tuples(arm_costs, st.booleans()), min_size=3, max_size=9),
    st.floats(10, 600),
    st.floats(0, 30),
    st.booleans(),
    st.floats(0, 5),
)
def test_a_trial_that_knew_its_costs_would_keep_the_budget(
    arms: list[tuple[Cost, bool]], budget_s: float, before_s: float, numerics: bool, noted_s: float
) -> None:
    """Whatever is begun because it fits ends within 1.25 budgets, and all fit in the budget that is named."""

    def built(of: Budget) -> tuple[dict[str, Cost], dict[str, Cost], float]:
        costs: dict[str, Cost] = {}
        left: dict[str, Cost] = {}
        spent_s = before_s
        for number, (cost, unasked) in enumerate(arms):
            within = budget.UNASKED_WITHIN if unasked else budget.WITHIN
            if number < 2 or of.fits(cost, f"arm{number}", costs, spent_s, within=within):
                costs[f"arm{number}"] = cost
                spent_s += cost.build_s
            else:
                left[f"arm{number}"] = cost
        return costs, left, spent_s

    of = Budget(budget_s, 0.0, numerics, noted_s)
    costs, left, spent_s = built(of)
    if len(costs) > 2:
        assert spent_s + of.after_builds_s(costs) <= budget.WITHIN * budget_s + 1e-6
    if left:
        enough_s = of.enough_s(costs, left, [*costs, *left], spent_s)
        assert enough_s > budget_s
        enough = replace(of, seconds=enough_s)
        again, still_left, took_s = built(enough)
        assert not still_left
        before_final_s = took_s + enough.after_builds_s(again) - enough.closing_s()
        assert enough.final_fits(again, list(again), before_final_s - 1e-6)


def enough(*built: tuple[str, bool, float, float]) -> float:
    """The budget that is named where a conversion was left out beside arms of so many seconds, and so many of
    these from the caches."""
    done = [
        Attempt(
            ArmPlan(name, as_it_is, (), fp8, "as_is", compiled=True),
            [
                SimpleNamespace(
                    step_s=0.1,
                    compiled=SimpleNamespace(graphs=1),
                    warm_up_s=build_s,
                    from_caches_s=from_caches_s,
                )  # type: ignore[list-item]
            ],
            build_s=build_s,
        )
        for name, fp8, build_s, from_caches_s in built
    ]
    late = Attempt(
        ArmPlan("prescribed", as_it_is, ("compile-blocks",), True, "as_is", compiled=True),
        no_number=Budget(10.0).used_up,
    )
    found = admission.enough_for_all_s([*done, late], TrialRun(CPU, Budget(10.0)))
    assert found is not None
    return found


def test_the_budget_that_is_named_is_enough_where_the_caches_hold_nothing_of_what_was_left_out() -> None:
    """The blocks of a BF16 that compile in 8 s come from the caches in 1.3 s, of which 0.3 s are steps."""
    eager = ("as_is", True, 0.4, 0.0)
    cold, warm = (enough(eager, ("bf16_compiled", False, *each)) for each in ((8.0, 0.0), (1.3, 1.0)))
    assert warm >= cold >= 8.0 * budget.DEARER_FP8
    others = enough(eager, ("bf16_compiled", False, 8.0, 1.0))
    assert others == cold, "others compiled it for this trial, in 8 s"
    fp8 = [enough(eager, ("compile-blocks", True, *each)) for each in ((16.0, 0.0), (3.2, 2.9))]
    assert fp8[1] >= fp8[0] >= 16.0


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [(8_030_261_248, 120.0), (6_738_415_616, 120.0), (3_212_749_824, 60.0), (NOT_RECORDED, 60.0)],
    ids=["Llama 3.1 8B", "Llama 2 7B", "Llama 3.2 3B", "not counted"],
)
def test_the_default_is_longer_for_what_is_called_7b(parameters: int, seconds: float) -> None:
    of = job(blocks=3)
    facts = examine(of)
    facts = msgspec.structs.replace(
        facts, network=msgspec.structs.replace(facts.network, parameters=parameters)
    )
    default, asked = budget_for(of, facts, None), budget_for(of, facts, 30.0)
    assert (default.seconds, default.stretches) == (seconds, seconds == 60.0)
    assert (asked.seconds, asked.stretches) == (30.0, False)
    of.model.compile(backend="eager")
    assert budget_for(of, facts, None).seconds == 120.0, "one graph of several blocks"


def test_a_build_ends_in_time_for_the_window_and_what_follows() -> None:
    of = Budget(60.0, 1000.0)
    assert of.build_until(COSTS) == of.build_until(COSTS, needed=True) == 1000 + 75 - of.after_builds_s(COSTS)
    assert replace(of, stretches=True).build_until({}, needed=True) == of.build_until({}, essential=True)
    assert of.build_until({}, essential=True) == 1000 + 120 - of.closing_s()
    assert Budget(0.0, 1000.0).build_until({}, essential=True) == 1060, "a step needs its time in any case"
