"""What a variant is expected to cost, what fits, which budget is enough, and when a build is given up."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.examine import examine
from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial import budget_for
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.measure import bench, budget, timer
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Overrun, given_up
from fp8doctor.trial.measure.budget import Budget, Cost, expected
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.variant import Variant, VariantPlan, as_it_is
from tests.trial.decoder import CPU, Decoder, job


def estimate(
    costs: dict[str, Cost], base: str | None, *, name: str, compiles: bool, fp8: bool | None = None
) -> Cost | None:
    return expected(VariantPlan(name, as_it_is, (), fp8, base, compiled=compiles), costs)


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
    assert estimate(COSTS, "as_is", name=name, compiles=compiles, fp8=fp8) == cost
    assert estimate(COSTS, "was not built", name=name, compiles=compiles, fp8=fp8) == cost
    assert estimate({}, "as_is", name=name, compiles=compiles, fp8=fp8) is None


FP8 = Cost(11.0, (0.1, 0.2), compiles=True, fp8=True)


def test_a_compilation_of_fp8_tells_more_than_one_of_bf16() -> None:
    costs = {"as_is": FP8, "bf16_compiled": COSTS["bf16_compiled"]}
    assert estimate(costs, "as_is", name="arm", compiles=True, fp8=True) == FP8
    in_bf16 = estimate(costs, "bf16_compiled", name="arm", compiles=True, fp8=False)
    assert in_bf16 == Cost(4.0, (0.1, 0.25), True), "what FP8 took says nothing of it"


def test_bf16_is_expected_to_compile_in_less_than_fp8_did() -> None:
    """Of a step whose own compilation took 35 s, that of BF16 took 12.5 (a small Flux, H200, torch 2.11)."""
    in_bf16 = estimate({"as_is": replace(FP8, build_s=36.0)}, None, name="a", compiles=True, fp8=False)
    assert in_bf16 == Cost(14.4, (0.1, 0.2), True)


def test_eager_bf16_is_expected_to_compile_nothing() -> None:
    """However long the step as it is compiled."""
    costs = {"as_is": replace(FP8, build_s=36.0)}
    found = estimate(costs, None, name=ArmName.BF16, compiles=False, fp8=False)
    assert found == Cost(pytest.approx(0.9), (0.1, 0.2))


def test_the_copy_of_the_check_is_expected_to_cost_what_eager_bf16_did() -> None:
    """However long the step as it is compiled. It has one cut."""
    costs = {"as_is": replace(FP8, build_s=36.0), "bf16": Cost(0.5, (0.1, 0.3))}
    found = estimate(costs, None, name=ArmName.SELF_CHECK, compiles=False, fp8=False)
    assert found == Cost(0.5, (0.1,))


def test_the_second_recipe_is_expected_to_cost_what_the_first_did() -> None:
    costs = {"as_is": FP8, "recipe-rowwise": replace(FP8, build_s=18.0)}
    second = estimate(costs, "as_is", name="recipe-rowwise-with-gw-hp", compiles=True, fp8=True)
    assert second == replace(FP8, build_s=18.0)


def test_compiling_blocks_costs_a_part_of_what_is_compiled_as_one() -> None:
    as_one = {"as_is": Cost(30.0, (0.04,), True), "bf16": Cost(0.5, (0.04,))}
    assert estimate(as_one, "as_is", name="compile-blocks", compiles=True) == Cost(
        9.0, (0.04,), True, by_block=True
    )
    assert estimate(COSTS, "as_is", name="compile-blocks", compiles=True) == Cost(4.0, (0.1, 0.2), True), (
        "an eager base tells nothing of it"
    )


def test_a_recipe_by_block_costs_what_blocks_cost() -> None:
    """However long the graph of the step as it is compiled."""
    blocks = Cost(10.0, (0.04,), True, True, by_block=True)
    costs = {"as_is": Cost(94.0, (0.04,), True, True), "compile-blocks": blocks}
    found = estimate(costs, "compile-blocks", name="recipe-tensorwise", compiles=True, fp8=True)
    assert found == replace(blocks, build_s=15.0)
    last = estimate(
        {**costs, "recipe-tensorwise": replace(blocks, build_s=12.0)},
        "compile-blocks",
        name="recipe-rowwise-with-gw-hp",
        compiles=True,
        fp8=True,
    )
    assert last == replace(blocks, build_s=12.0)
    assert estimate(costs, "as_is", name="checkpointing-off", compiles=True, fp8=True) == costs["as_is"]


def at(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    """Stop the budget's clock."""
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now_s))


def test_an_arm_fits_when_its_build_the_least_window_and_all_that_follows_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = timer.LEAST_ROUNDS
    # the shallow cuts for three steps; the deep ones, of which the first is no long step, for two and three
    window = least * (3 * 0.1 + 2 * 0.3 + 3 * 0.1 + 3 * 0.2)
    two = {"as_is": Cost(1.0, (0.1, 0.2))}
    profiles = (2 * 0.3 + 6 * 0.3) + (2 * 0.3 + 6 * 0.4)
    for numerics, noted_s, closing_s in ((False, 0.0, 5.2), (True, 0.0, 7.6), (True, 3.0, 10.6)):
        of = Budget(60.0, 0.0, numerics=numerics, noted_s=noted_s)
        spent = 60 - 0.5 - window - profiles - closing_s
        for by in (of.end, of.last):
            begun = spent + by - of.end
            for now, fits in ((begun - 0.01, True), (begun + 0.01, False)):
                at(monkeypatch, now)
                assert of.fits(Cost(0.5, (0.1, 0.3)), "bf16", two, by) is fits


def test_the_copy_of_the_check_is_not_proven() -> None:
    with_copy = {**COSTS, ArmName.SELF_CHECK: Cost(0.1, (0.1,))}
    assert Budget(60.0, 0.0).after_rounds_s(with_copy) == Budget(60.0, 0.0).after_rounds_s(COSTS)
    other = {**COSTS, "another": Cost(0.1, (0.1,))}
    assert Budget(60.0, 0.0).after_rounds_s(other) == pytest.approx(
        Budget(60.0, 0.0).after_rounds_s(COSTS) + 0.3
    )


arm_costs = st.builds(
    Cost,
    st.floats(0, 90),
    st.tuples(st.floats(1e-3, 0.5), st.floats(1e-3, 0.5)),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.slow
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

    now_s = before_s

    def built(of: Budget) -> tuple[dict[str, Cost], dict[str, Cost]]:
        nonlocal now_s
        costs: dict[str, Cost] = {}
        left: dict[str, Cost] = {}
        now_s = before_s
        for number, (cost, unasked) in enumerate(arms):
            by = of.end if unasked else of.last
            if number < 2 or of.fits(cost, f"arm{number}", costs, by):
                costs[f"arm{number}"] = cost
                now_s += cost.build_s
            else:
                left[f"arm{number}"] = cost
        return costs, left

    of = Budget(budget_s, 0.0, numerics=numerics, noted_s=noted_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now_s))
        costs, left = built(of)
        if len(costs) > 2:
            assert now_s + of.after_builds_s(costs) <= budget.HARD_LIMIT * budget_s + 1e-6
        if left:
            enough_s = of.enough_s(costs, left)
            assert enough_s > budget_s
            enough = replace(of, seconds=enough_s)
            again, still_left = built(enough)
            assert not still_left
            assert now_s + enough.after_builds_s(again) <= enough.end + 1e-6


def enough(*built: tuple[str, bool, float, float]) -> float:
    """The budget that is named where a conversion was left out beside arms of so many seconds, and so many of
    these from the caches."""
    done = [
        Attempt(
            VariantPlan(name, as_it_is, (), fp8, "as_is", compiled=True),
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
        VariantPlan("prescribed", as_it_is, ("compile-blocks",), True, "as_is", compiled=True),
        no_number=Budget(10.0).used_up,
    )
    explored = (
        Attempt(replace(late.plan, name=name, explored=True), no_number=late.no_number) for name in "ab"
    )
    found = budget.enough_for_the_rest_s([*done, late], Budget(10.0))
    assert found is not None
    assert found == budget.enough_for_the_rest_s([*done, late, *explored], Budget(10.0)), (
        "it has to decide only"
    )
    return found


def test_the_budget_that_is_named_is_enough_where_the_caches_hold_nothing_of_what_was_left_out() -> None:
    """The blocks of a BF16 that compile in 8 s come from the caches in 1.3 s, of which 0.3 s are steps."""
    eager = ("as_is", True, 0.4, 0.0)
    cold, warm = (enough(eager, ("bf16_compiled", False, *each)) for each in ((8.0, 0.0), (1.3, 1.0)))
    assert warm >= cold >= 8.0 * budget.FP8_BUILD
    fp8 = [enough(eager, ("compile-blocks", True, *each)) for each in ((16.0, 0.0), (3.2, 2.9))]
    assert fp8[1] >= fp8[0] >= 16.0


def test_a_build_that_was_given_up_has_twice_its_time_and_others_are_not_expected_by_twice_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a U-Net 67 s of compiling were given up at 96 s of 90; what it takes is known only to be more."""
    at(monkeypatch, 96.0)
    late = Attempt(
        VariantPlan(ArmName.BF16_COMPILED, as_it_is, fp8=False, compiled=True),
        no_number=Budget(90.0).used_up,
        build_s=67.0,
    )
    plan = VariantPlan("prescribed", as_it_is, ("compile-model",), True, "as_is", compiled=True)
    left = Attempt(plan, no_number=late.no_number)
    of = Budget(90.0, 0.0)
    for attempts, builds_s in (([late], 67.0), ([late, left], 67.0 * (1 + budget.FP8_BUILD))):
        found = budget.enough_for_the_rest_s([built("as_is"), *attempts], of)
        assert found is not None
        costs = {each.plan.name: Cost(1.0, (0.1,)) for each in (built("as_is"), *attempts)}
        assert found - 10 <= 96 + builds_s + of.after_builds_s(costs) <= found


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [(8_030_261_248, 120.0), (6_738_415_616, 120.0), (3_212_749_824, 90.0), (NOT_RECORDED, 90.0)],
    ids=["Llama 3.1 8B", "Llama 2 7B", "Llama 3.2 3B", "not counted"],
)
def test_the_default_is_longer_for_what_is_called_7b(parameters: int, seconds: float) -> None:
    of = job(blocks=3)
    facts = examine(of)
    facts = msgspec.structs.replace(
        facts, network=msgspec.structs.replace(facts.network, parameters=parameters)
    )
    now = time.monotonic()
    assert budget_for(of, facts, None, now).seconds == seconds
    asked = budget_for(of, facts, 30.0, now)
    assert (asked.seconds, asked.began) == (30.0, now)
    of.model.compile(backend="eager")
    assert budget_for(of, facts, None, now).seconds == 120.0, "one graph of several blocks"


def test_the_default_is_longer_if_no_blocks_repeat() -> None:
    of = job(blocks=0)
    facts = examine(of)
    assert not facts.network.blocks
    assert budget_for(of, facts, None, time.monotonic()).seconds == 120.0


def test_a_build_ends_in_time_for_the_window_and_what_follows() -> None:
    of = Budget(60.0, 1000.0)
    assert of.build_until(COSTS) == 1000 + 75 - of.after_builds_s(COSTS)
    assert of.build_until({}) == pytest.approx(1000 + 67.5 - of.closing_s()), "of unknown steps"


def test_the_arm_that_is_built_has_its_own_window_kept_free() -> None:
    done = [
        Attempt(
            VariantPlan("as_is", as_it_is, fp8=True),
            [SimpleNamespace(step_s=0.5, compiled=SimpleNamespace(graphs=0), warm_up_s=1.0)],  # type: ignore[list-item]
            build_s=2.0,
        )
    ]
    of = Budget(60.0, 1000.0)
    found = budget.build_until(VariantPlan("bf16", as_it_is, fp8=False), done, of)
    both = {name: Cost(2.0, (0.5,)) for name in ("as_is", "bf16")}
    assert found == of.build_until(both) < of.build_until({"as_is": both["as_is"]})


@pytest.mark.parametrize(
    ("load_s", "ends", "deadline"),
    [(0.0, 60.0, 71.0), (20.0, 60.0, 71.0), (30.0, 60.0, 71.0), (50.0, 80.0, 91.0), (600.0, 630.0, 641.0)],
)
def test_the_load_counts_but_leaves_the_trial_half_of_the_budget(
    load_s: float, ends: float, deadline: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is ready 4 s after the deadline."""
    at(monkeypatch, 1000.0 + load_s)
    of = Budget.since(1000.0, 60.0)
    assert (of.end, of.deadline, of.elapsed_s) == (1000.0 + ends, 1000.0 + deadline, load_s)


def test_a_trial_that_begins_again_has_the_deadline_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1040.0)
    first = Budget.since(1000.0, 60.0)
    at(monkeypatch, 1080.0)
    again = Budget.since(1000.0, 60.0, first.deadline)
    assert (again.deadline, again.end, again.elapsed_s) == (first.deadline, first.end, 80.0)
    assert Budget.since(1000.0, 60.0).deadline == first.deadline + 40.0


def test_profiles_are_left_out_where_they_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    of, cost = Budget(60.0, 0.0), Cost(1.0, (0.1, 0.2))
    last = 75 - of.closing_s() - cost.profile_s
    for now, fits in ((last - 0.01, True), (last + 0.01, False)):
        at(monkeypatch, now)
        assert of.profile_fits(cost) is fits


def built(name: str) -> Attempt:
    """A variant that was built in a second."""
    ready: Any = SimpleNamespace(step_s=0.1, compiled=SimpleNamespace(graphs=0), from_caches_s=0.0)
    return Attempt(VariantPlan(name, as_it_is, fp8=True), [ready], build_s=1.0)


@pytest.mark.parametrize("spent", [0.5, 1.1, 1.26])
@pytest.mark.parametrize(
    "name", ["bf16", "bf16_compiled", "bf16_prescribed", "prescribed", "float8_rowwise", "keep-in-bf16"]
)
def test_only_what_decides_is_begun_after_a_compilation_that_took_the_whole_budget(
    name: str, spent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is begun up to 1.25 budgets. Seen on an H200: one graph of 24 FP8 blocks compiles for 80 s. A
    step without BF16 beside it says nothing."""
    at(monkeypatch, spent * 600)
    plan = VariantPlan(name, as_it_is, ("x",), False, "as_is")
    found = budget.no_time_for(plan, [built("as_is")], Budget(600.0, 0.0))
    limit = budget.PROPOSAL_LIMIT if name == "keep-in-bf16" else budget.HARD_LIMIT
    assert (found is None) is (spent < limit)


@pytest.mark.parametrize(("spent", "late"), [(0.9, False), (0.98, True), (1.03, True)])
@pytest.mark.parametrize("explored", [False, True], ids=["proposed", "unasked"])
def test_explorations_go_first_when_the_time_is_short(
    spent: float, late: bool, explored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, spent * 600)
    plan = VariantPlan("x", as_it_is, ("x",), True, "as_is", explored=explored)
    of = Budget(600.0, 0.0)
    found = budget.no_time_for(plan, [replace(built("as_is"), build_s=20.0)], of)
    assert (found is not None) is ((late and explored) or spent > 1.0)
    if found:
        assert found.why is (Reason.NO_TIME_LEFT if spent > 1.0 else Reason.NOT_EXPECTED_TO_FIT)
    if found and spent < 1.0:
        assert found.sentence == "it did not fit into the budget of 600 s"


def test_the_first_conversion_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1.1 * 600)
    plan, of = VariantPlan("float8_rowwise", as_it_is, ("x",), True, "as_is"), Budget(600.0, 0.0)
    assert budget.no_time_for(plan, [built("as_is")], of) is None
    assert budget.no_time_for(plan, [built("as_is"), built("float8_tensorwise")], of) == of.used_up


def spin() -> None:
    while True:
        time.sleep(1e-3)


def test_it_is_given_up_when_the_time_is_over() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Overrun), given_up(time.monotonic(), interrupts=True):
        spin()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_swallows_it_meets_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "AGAIN_S", 1e-2)

    def swallow_one() -> None:
        with suppress(BaseException):
            spin()
        spin()

    with pytest.raises(Overrun), given_up(time.monotonic(), interrupts=True):
        swallow_one()


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


def wait() -> None:
    """Take as long as several alarms."""
    until = time.monotonic() + 10 * bench.AGAIN_S
    while time.monotonic() < until:
        time.sleep(1e-4)


def test_what_opens_and_what_cleans_up_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a mode of torch stays on, and each later step raises."""
    monkeypatch.setattr(bench, "AGAIN_S", 1e-3)
    mode, cleaned = Opens(), []

    def step() -> None:
        try:
            with mode:
                spin()
        finally:
            wait()
            cleaned.append(True)

    with pytest.raises(Overrun), given_up(time.monotonic(), interrupts=True):
        step()
    assert (mode.opened, mode.closed, cleaned) == (True, True, [True])


def test_a_users_process_has_no_alarm_of_ours() -> None:
    with given_up(time.monotonic(), interrupts=False):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_only_the_main_thread_is_interrupted() -> None:
    seen: list[Any] = []

    def other() -> None:
        with given_up(time.monotonic(), interrupts=True):
            seen.append(signal.getitimer(signal.ITIMER_REAL))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(timeout=600)
    assert seen == [(0.0, 0.0)]


@pytest.mark.slow
def test_an_arm_that_never_ends_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def soon(self: Budget, costs: dict[str, object]) -> float:
        return time.monotonic() + 0.05 if costs else math.inf

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
    as_is, left = found.arms
    assert as_is.tried
    assert (left.tried, left.why) == (False, Reason.NO_TIME_LEFT)
    assert left.reason == "it was given up after 0 s, because no time was left to build it"
    assert found.enough_s, "with which it may be tried again"
    assert found.harm == ()


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [True, False])
def test_a_backward_that_compiles_can_be_interrupted(own_process: bool) -> None:
    """A GPU's backward runs in a thread of its own, unless autograd has only one; alarms come to the main."""
    threads: list[bool] = []

    def noted(variant: Variant) -> Variant:
        forward = variant.model.forward

        def watched(*given: Any, **named: Any) -> torch.Tensor:
            output = forward(*given, **named)
            output.register_hook(lambda _: threads.append(torch._C._is_multithreading_enabled()))
            return output

        variant.model.forward = watched  # type: ignore[method-assign]
        return variant

    run = TrialRun(CPU, Budget(600.0), own_process=own_process)
    conduct(job(model=Decoder(1).bfloat16()), [], [VariantPlan("as_is", noted)], run)
    assert threads[:2] == [not own_process] * 2
    assert set(threads[2:]) == {True}


@pytest.mark.slow
def test_no_further_cut_is_begun_that_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Variant] = []

    def noted(variant: Variant) -> Variant:
        made.append(variant)
        return variant

    monkeypatch.setattr(bench.Bench, "_further_s", lambda *_, **settings: math.inf)
    found = conduct(
        job(model=Decoder(26).bfloat16()),
        ["blocks"],
        [VariantPlan("as_is", noted)],
        TrialRun(CPU, Budget(600.0)),
    )
    assert len(made) == 1
    assert (found.arms[0].tried, found.arms[0].why) == (False, Reason.NO_TIME_LEFT)
