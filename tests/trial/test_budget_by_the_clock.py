"""The budget holds for what was recorded on an H200, on a clock that only what was recorded moves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8doctor.stages import BUDGET_S
from fp8doctor.trial import conductor
from fp8doctor.trial.measure import bench, budget, rounds, timer
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import Variant, VariantPlan
from tests.trial.decoder import CPU, Decoder, job
from tests.trial.recorded_trials import TRIALS, Clock, Seen, took
from tests.trial.test_budget import COSTS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (budget, timer, conductor):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    return clock


@pytest.mark.parametrize(
    ("name", "most_s", "left_out"),
    [
        ("llama_8b", 90, {"recipe-rowwise", "recipe-rowwise-with-gw-hp"}),
        ("llama_8b_float8", 90, {"recipe-rowwise"}),
        ("lora", 90, {"compile-blocks"}),
        ("few_tokens", 92, {"recipe-rowwise"}),
        ("llama_eager_attention", 90, {"keep-in-bf16"}),
        ("mixtral", 90, {"recipe-rowwise", "recipe-rowwise-with-gw-hp"}),
        ("flux", 98, set()),
        ("encoder_decoder", 110, set()),  # two variants of it compile for 27 s each
        ("flux_like", 99, set()),
    ],
)
def test_the_default_budget_holds_for_the_whole_command_and_what_decides_is_timed(
    name: str, most_s: float, left_out: set[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 25 s for the imports and the load, as eight jobs took 19 to 30 (H100, torch 2.11)."""
    parts, timed, rounds = took(name, clock, monkeypatch, BUDGET_S, load_s=25.0)
    assert sum(parts.values()) <= most_s <= budget.HARD_LIMIT * BUDGET_S, parts
    assert set(TRIALS[name][2]) - set(timed) == left_out
    assert rounds >= timer.LEAST_ROUNDS


@pytest.mark.parametrize(
    ("told_at", "rounds", "most_s"),
    [(5, 5, 74), (6, 10, 80), (999, 10, 80)],
)
def test_an_open_sign_prolongs_a_trial_whose_window_began_late(
    told_at: int, rounds: int, most_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a slow host: the step as it is compiled for 35 of 60 s, and five rounds told nothing."""
    parts, _, taken = took("flux", clock, monkeypatch, 64.0, told_at=told_at)
    assert taken == rounds
    assert sum(parts.values()) <= most_s, parts
    assert clock.for_numerics_s > 0, "they are not kept time for here, and the end is"


@pytest.mark.slow
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

    monkeypatch.setattr(rounds, "sign_is_known", lambda *known: False)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=clock))
    of, raises_at = Budget(60.0, clock()), 1065.0
    laid_out = bench.Bench(job(model=Decoder(1).bfloat16()), [], CPU)
    attempts = [
        Attempt(VariantPlan("as_is", ticking(math.inf), fp8=True)),
        Attempt(VariantPlan("bf16", ticking(math.inf), fp8=False)),
        Attempt(VariantPlan("raises", ticking(raises_at), ("x",), base="as_is")),
    ]
    for attempt in attempts:
        laid_out.build(attempt)
    clock.now_s = 1050.0
    tracer = Tracer(laid_out, TrialRun(CPU, of))
    samples = conductor._samples(attempts, tracer)
    laid_out.close()
    assert {arm for arm, _ in samples} == {"as_is", "bf16"}
    assert raises_at < clock() <= of.deadline + 9.0, "a round is taken in any case"


def test_with_twice_the_budget_everything_is_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, timed, _ = took("llama_8b", clock, monkeypatch, budget_s=120)
    assert "recipe-rowwise" in timed
    assert sum(parts.values()) <= 120


def test_least_rounds_end_at_the_latest_and_one_is_taken_in_any_case(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert took("llama_8b", clock, monkeypatch, latest=42.0)[2] == 3
    assert took("llama_8b", clock, monkeypatch, latest=0.0)[2] == 1


def test_the_least_rounds_cost_the_profiles_and_late_numerics_have_a_share(clock: Clock) -> None:
    of, proofs_s = Budget(60.0, clock(), numerics=True), 3 * (0.2 + 0.3 + 0.25)
    assert of.rounds_latest(COSTS) == pytest.approx(clock() + 75 - proofs_s - of.closing_s())
    ending_s = budget.CLOSING_S + budget.REPORT_S
    assert of.numerics_until() == pytest.approx(clock() + 60 - ending_s)
    clock.now_s += 62
    assert of.numerics_until() == pytest.approx(clock() + 2.4)
    clock.now_s += 8
    assert of.numerics_until() == pytest.approx(of.began + 75 - ending_s)


@pytest.mark.parametrize(("budget_s", "noted_s"), [(60.0, 3.5), (10.0, 3.5), (3.0, 0.0)])
def test_what_is_looked_at_after_late_numerics_ends_within_the_bound(
    budget_s: float, noted_s: float, clock: Clock
) -> None:
    of = Budget(budget_s, clock(), numerics=True, noted_s=noted_s)
    for spent in (0.5, 1.0, 1.2, 1.25):
        clock.now_s = of.began + spent * budget_s
        ends = of.numerics_until() + noted_s + budget.CLOSING_S * min(1.0, 0.12 * budget_s / 5.2)
        assert ends <= of.deadline + 1e-6 <= of.began + budget.HARD_LIMIT * budget_s + 1e-6


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
