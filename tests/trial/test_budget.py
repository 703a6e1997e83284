"""What is begun, which budget is enough, and when a build is given up."""

import math
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.trial import conductor
from fp8doctor.trial.copies.step import Place, Variant, VariantPlan, as_it_is
from fp8doctor.trial.measure import bench, budget, timer
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import HARD_LIMIT, Budget, Overrun, TrialRun, abort_after
from fp8doctor.trial.measure.evidence import Compilations
from tests.trial.conducted import conduct
from tests.trial.decoder import AS_IS, BF16, CPU, Decoder, job, run, trial
from tests.trial.planted import CLOCK, Ticking
from tests.trial.recorded_trials import TRIALS, Clock, RecordedBench, Seen, took


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (budget, timer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    return clock


def test_recorded_trials_keep_their_budgets_and_time_what_decides(clock: Clock) -> None:
    """30 of the 54 trials over which the rule was chosen."""
    variants = few_rounds = 0
    for name, (_, _, arms) in TRIALS.items():
        for budget_s in (60.0, 90.0, 120.0):
            for load_s in (0.0, 25.0):
                with pytest.MonkeyPatch.context() as patch:
                    parts, timed, rounds = took(name, clock, patch, budget_s, load_s=load_s)
                assert sum(parts.values()) <= HARD_LIMIT * budget_s, (name, parts)
                variants, few_rounds = variants + len(timed), few_rounds + (rounds < timer.LEAST_ROUNDS)
                if budget_s > 60:
                    decide = {each for each, seen in arms.items() if not (seen.explored or seen.base)}
                    assert decide <= {*timed}, (name, timed)
    assert variants >= 133
    assert few_rounds <= 1


def test_an_open_sign_prolongs_the_rounds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a slow host: the step as it is compiled for 35 of 60 s, and five rounds told nothing."""
    parts, _, taken = took("flux", clock, monkeypatch, 64.0, open_until=999)
    assert taken >= 10
    assert sum(parts.values()) <= HARD_LIMIT * 64.0, parts


@pytest.mark.parametrize(("launched", "roomy"), [(0.3, True), (0.95, False)])
def test_conditions_drop_a_variant_or_move_it_to_the_end(
    launched: float, roomy: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: a Gemma 1B whose host sets the pace ran 1.45x as fast in one graph, not timed; an 8B
    model with LoRA 1.5x without checkpointing, not timed either."""
    seen = {
        "as_is": Seen(1.0, (90.0,), 0.0),
        "bf16_compiled": Seen(5.0, (60.0,), 0.0, True, launched=launched),
        "bf16_whole": Seen(9.0, (40.0,), 0.0, True, launched=launched),
        "checkpointing-off": Seen(5.0, (50.0,), 0.0, True, "as_is"),
        "recipe-rowwise": Seen(5.0, (50.0,), 0.0, True, "as_is"),
    }
    places = (Place.AS_IS, Place.OTHER_BF16, Place.OTHER_BF16, Place.NO_CHECKPOINTING, Place.REST)
    plans = [
        VariantPlan(name, as_it_is, place=place, if_host_waits=name == "bf16_whole")
        for name, place in zip(seen, places, strict=True)
    ]
    bench = RecordedBench([Attempt(plan) for plan in plans], TrialRun(CPU, Budget(600.0)), seen, clock)
    monkeypatch.setattr(conductor, "gpu_gib", lambda device: 10.0)
    monkeypatch.setattr(Attempt, "full_peak", lambda self, plan: 4.0 if roomy else 6.0)
    conductor.build(cast(Bench, bench))
    last = ["checkpointing-off", "recipe-rowwise"] if roomy else ["recipe-rowwise", "checkpointing-off"]
    whole = ["bf16_whole"] if launched > 0.9 else []
    assert bench.order == ["as_is", "bf16_compiled", *whole, *last]
    assert {each.plan.name for each in bench.attempts} == {*bench.order}


builds_s = st.lists(st.floats(0.1, 200.0), min_size=5, max_size=5)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(builds_s, st.floats(0.01, 0.5), st.floats(0.0, 40.0), st.sampled_from([60.0, 90.0, 120.0]))
def test_whatever_compiles_for_how_long_the_command_ends_within_its_bound(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    builds_s: list[float],
    step_s: float,
    load_s: float,
    of_s: float,
) -> None:
    """Of a load that takes up to half of the budget. No build is known before it ended, and one is begun only
    with the time to end it or to give it up."""
    names = ("as_is", "bf16", "bf16_compiled", "prescribed", "recipe-rowwise")
    arms = {
        name: Seen(
            build_s, (1e3 * step_s,), 3 * step_s, name != "bf16", None if number < 3 else "as_is", number > 3
        )
        for number, (name, build_s) in enumerate(zip(names, builds_s, strict=True))
    }
    with monkeypatch.context() as patch:
        patch.setitem(TRIALS, "any", (2.0, 0.5, arms))
        parts, timed, rounds = took("any", clock, patch, of_s, load_s=min(load_s, of_s / 2))
    assert sum(parts.values()) <= budget.HARD_LIMIT * of_s, parts
    assert rounds >= timer.LEAST_ROUNDS or not timed


def built(name: str, build_s: float = 1.0, graphs: int = 0) -> Attempt:
    """A variant that was built, with steps of 0.1 s."""
    ready: Any = SimpleNamespace(step_s=0.1, compiled=Compilations(graphs=graphs))
    return Attempt(VariantPlan(name, as_it_is, fp8=True), [ready], build_s=build_s)


def at(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    """Stop the budget's clock."""
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now_s))


@pytest.mark.parametrize("spent", [0.5, 1.1, 1.26])
@pytest.mark.parametrize("place", Place)
def test_only_what_decides_is_begun_after_the_budget(
    place: Place, spent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: one graph of 24 FP8 blocks compiles for 80 s. A step without BF16 beside it says
    nothing."""
    at(monkeypatch, spent * 600)
    plan = VariantPlan("x", as_it_is, ("x",), False, "as_is", place=place)
    found = Budget(600.0, 0.0).no_time_for(plan, [built("as_is")])
    assert (found is None) is (spent < (HARD_LIMIT if place <= Place.OTHER_BF16 else 1.0))


def test_a_build_that_takes_as_long_as_its_like_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    of, explored = Budget(100.0, 0.0), VariantPlan("x", as_it_is, ("x",), True, "as_is", explored=True)
    done = [built("as_is", 30.0, graphs=1)]
    at(monkeypatch, 50.0)
    assert of.no_time_for(explored, done) is None
    at(monkeypatch, 70.0)
    found = of.no_time_for(explored, done)
    assert found is not None
    assert found.why is Reason.NOT_EXPECTED_TO_FIT


@pytest.mark.parametrize("place", [Place.OWN_BF16, Place.PLAN, Place.OTHER_BF16])
def test_in_a_users_process_what_decides_has_to_fit_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alarm gives a build up there: one graph would compile on for a minute beyond the bound."""
    of, plan = Budget(100.0, 0.0), VariantPlan("x", as_it_is, fp8=False, compiled=True, place=place)
    for now_s, fits in ((50.0, True), (110.0, place is Place.OWN_BF16)):
        at(monkeypatch, now_s)
        found = of.no_time_for(plan, [built("as_is", 30.0, graphs=1)], own_process=False)
        assert (found is None) is fits
        assert of.no_time_for(plan, [built("as_is", 30.0, graphs=1)]) is None


def test_the_budget_that_is_named_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a build that was given up: of a U-Net 67 s of compiling at 96 s of 90."""
    at(monkeypatch, 96.0)
    of, done = Budget(90.0, 0.0), [built("as_is")]
    plan = VariantPlan(ArmName.BF16_COMPILED, as_it_is, compiled=True, place=Place.OTHER_BF16)
    late = Attempt(plan, no_number=of.left_out(Reason.NO_TIME_LEFT), build_s=67.0)
    unasked = replace(late, plan=replace(plan, base="as_is", explored=True, place=Place.REST))
    assert of.enough_s(done) is None
    assert of.enough_s([*done, late]) == of.enough_s([*done, late, unasked]), "it has to decide only"
    assert (of.enough_s([*done, late]) or 0.0) >= 96 + 67 + of.reserve_s(done)


@pytest.mark.parametrize(("load_s", "ends"), [(0.0, 60.0), (30.0, 60.0), (50.0, 80.0), (600.0, 630.0)])
def test_the_load_counts_but_leaves_the_trial_half_of_the_budget(
    load_s: float, ends: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is ready 4 s after the deadline, which is that of the first if a trial begins again."""
    at(monkeypatch, 1000.0 + load_s)
    of = Budget.since(1000.0, 60.0)
    assert (of.end, of.deadline, of.elapsed_s) == (1000.0 + ends, 1011.0 + ends, load_s)
    at(monkeypatch, 1040.0 + load_s)
    again = Budget.since(1000.0, 60.0, of.deadline)
    assert (again.deadline, again.end, again.elapsed_s) == (of.deadline, of.end, 40.0 + load_s)


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_fewer_rounds_than_the_interval_needs_are_not_called_reliable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=CLOCK, monotonic=time.monotonic))
    monkeypatch.setattr(Budget, "rounds", lambda self, attempts: timer.Limits(0.0, 0.0))
    result = trial(job(model=Ticking(1).bfloat16()), BF16)
    assert [len(arm.rounds_ms) for arm in result.arms] == [1]
    assert result.reliable is False
    assert "for only 1 of the 5 rounds" in (result.reason or "")


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_what_the_budget_does_not_reach_is_said() -> None:
    arms = run(job(blocks=3), AS_IS, BF16, budget_s=0.0)
    assert arms["as_is"].tried
    assert arms["bf16"].why is Reason.NO_TIME_LEFT
    assert arms["bf16"].reason == "it did not fit into the budget of 0 s"


def spin() -> None:
    while True:
        time.sleep(1e-3)


def wait() -> None:
    """Take as long as several alarms."""
    until = time.monotonic() + 10 * budget.AGAIN_S
    while time.monotonic() < until:
        time.sleep(1e-4)


class Opens:
    """It takes long to enter and to leave it."""

    def __init__(self) -> None:
        self.opened = self.closed = False

    def __enter__(self) -> None:
        wait()
        self.opened = True

    def __exit__(self, *_: object) -> None:
        wait()
        self.closed = True


def test_it_is_given_up_even_if_one_alarm_is_swallowed_and_no_cleaning_up_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a mode of torch stays on, and each later step raises."""
    monkeypatch.setattr(budget, "AGAIN_S", 1e-3)
    before, mode, cleaned = signal.getsignal(signal.SIGALRM), Opens(), []

    def step() -> None:
        with suppress(BaseException):
            spin()
        try:
            with mode:
                spin()
        finally:
            wait()
            cleaned.append(True)

    with pytest.raises(Overrun), abort_after(time.monotonic(), interrupts=True):
        step()
    assert (mode.opened, mode.closed, cleaned) == (True, True, [True])
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_no_alarm_in_a_users_process_or_outside_the_main_thread() -> None:
    seen: list[Any] = []

    def inside(interrupts: bool) -> None:
        with abort_after(time.monotonic(), interrupts=interrupts):
            seen.append(signal.getitimer(signal.ITIMER_REAL))

    inside(interrupts=False)
    thread = threading.Thread(target=inside, args=(True,))
    thread.start()
    thread.join(timeout=600)
    assert seen == [(0.0, 0.0)] * 2


@pytest.mark.slow
def test_an_arm_that_never_ends_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(self: Budget, attempts: list[Attempt]) -> float:
        return time.monotonic() + 0.05 if attempts else math.inf

    def never(variant: Variant) -> Variant:
        spin()
        return variant

    monkeypatch.setattr(Budget, "build_until", soon)
    now_s = time.monotonic()
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now_s))  # a build takes 0 s
    plans = (VariantPlan("as_is", as_it_is), VariantPlan("never", never, ("x",), base="as_is"))
    found = conduct(
        job(model=Decoder(1).bfloat16()), [], plans, TrialRun(CPU, Budget(600.0), own_process=True)
    )
    assert [arm.why for arm in found.arms] == [None, Reason.NO_TIME_LEFT]
    assert found.enough_s, "with which it may be tried again"
    assert found.harm == ()


@pytest.mark.slow
@pytest.mark.usefixtures("few_rounds")
def test_in_a_users_process_a_late_variant_is_given_up_before_its_next_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def late(variant: Variant) -> Variant:
        made.append("late")
        return variant

    def soon(self: Budget, attempts: list[Attempt]) -> float:
        return time.monotonic() if attempts else math.inf

    monkeypatch.setattr(Budget, "build_until", soon)
    monkeypatch.setattr(Budget, "no_time_for", lambda *_, **__: None)
    plans = (VariantPlan("as_is", as_it_is), VariantPlan("late", late, ("x",), base="as_is"))
    of = job(model=Decoder(30).bfloat16())
    found = conduct(of, ["blocks"], plans, TrialRun(CPU, Budget(600.0)))
    assert [arm.why for arm in found.arms] == [None, Reason.NO_TIME_LEFT]
    assert made == ["late"]


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [True, False])
def test_a_backward_that_compiles_can_be_interrupted(own_process: bool) -> None:
    """A GPU's backward runs in a thread of its own, unless autograd has only one; alarms come to the main."""
    threads: list[bool] = []

    def watch(module: object, arguments: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: threads.append(torch._C._is_multithreading_enabled()))

    def noted(variant: Variant) -> Variant:
        variant.model.register_forward_hook(watch)
        return variant

    run = TrialRun(CPU, Budget(600.0), own_process=own_process)
    conduct(job(model=Decoder(1).bfloat16()), [], [VariantPlan("as_is", noted)], run)
    assert threads[:2] == [not own_process] * 2
    assert set(threads[2:]) == {True}
