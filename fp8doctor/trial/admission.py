"""Whether an arm may still be begun: what it is expected to cost, held to what is left of the budget."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    LEFT_OUT_FOR_TIME,
    ArmName,
    is_conversion,
)
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.budget import (
    AHEAD_SHARE,
    ASKED_WITHIN,
    UNASKED_WITHIN,
    WITHIN,
    Cost,
    ahead_of,
    compiled_anew,
    expected,
)
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.variant import ArmPlan, explores

NEEDED = (*BASELINES, ArmName.PRESCRIBED, ArmName.SELF_CHECK)
"""Arms that a report cannot do without. The first conversion of a model without FP8 is needed too."""


def no_time_for(plan: ArmPlan, attempts: Sequence[Attempt], run: TrialRun) -> NoNumber | None:
    """Tell why the arm may not be begun: it has to end in time by what it is expected to take, the first BF16
    by what is left for its build. What a report cannot do without is waited for where others compile it."""
    budget, costs = run.budget, costs_of(attempts)
    until = build_until(plan, attempts, run) if is_needed(plan, costs) else budget.end
    if budget.began + budget.spent_s >= until:
        return budget.used_up
    if is_first_bf16(plan, attempts) or _expected(plan, costs, run) is None:
        return None
    short = _too_short_for(plan, costs, run)
    if short and is_needed(plan, costs) and plan.name in run.ahead.under_way():
        wait_for_one([plan.name], latest_by_others(plan, attempts, run), run)
        short = _too_short_for(plan, costs, run)
    return short


def wait_for_one(arms: Collection[str], until: float, run: TrialRun) -> frozenset[str]:
    """Wait until nobody compiles one of these arms any more, until this clock at the latest, and name those
    that nobody does."""
    left_s = max(0.0, until - time.monotonic())
    if left_s:
        run.progress("waiting for variants that are compiled beside the trial", None)
    return run.ahead.wait_for_one(arms, left_s)


def _too_short_for(plan: ArmPlan, costs: Mapping[str, Cost], run: TrialRun) -> NoNumber | None:
    """Tell that the arm does not fit into the rest of the budget."""
    cost = _expected(plan, costs, run)
    assert cost is not None
    within = _within(plan, costs, known=run.ahead.took_s(plan.name) is not None)
    if run.budget.fits(cost, plan.name, costs, run.budget.spent_s, within=within):
        return None
    return run.budget.too_short(run.budget.takes_s(cost, plan.name, costs))


def latest_begin(plans: Sequence[ArmPlan], attempts: Sequence[Attempt], run: TrialRun) -> float:
    """Return the clock at which these arms would no longer fit if the trial built one after the other."""
    costs = costs_of(attempts)
    more: dict[str, Cost] = {}
    for plan in plans:
        cost = _expected(plan, {**costs, **more}, run)
        if cost is None:
            return -math.inf
        more[plan.name] = cost
    return run.budget.latest_begin(more, costs, within=min(_within(plan, costs) for plan in plans))


def latest_by_others(plan: ArmPlan, attempts: Sequence[Attempt], run: TrialRun) -> float:
    """Return the clock at which the arm would no longer fit if others had compiled it by then."""
    costs = costs_of(attempts)
    cost = _expected(plan, costs, run)
    if cost is None:
        return -math.inf
    more = {plan.name: ahead_of(cost, cost.build_s)}
    return run.budget.latest_begin(more, costs, within=_within(plan, costs, known=True))


def build_until(plan: ArmPlan, attempts: Sequence[Attempt], run: TrialRun) -> float:
    """Return the clock at which the build of the arm is given up, so that it and all others can be timed."""
    costs = costs_of(attempts)
    cost = _expected(plan, costs, run)
    return run.budget.build_until({**costs, plan.name: cost} if cost else costs)


def _within(plan: ArmPlan, costs: Mapping[str, Cost], *, known: bool = False) -> float:
    """Choose the budgets within which the arm has to fit; ``known`` says that others have compiled it."""
    if is_needed(plan, costs):
        return WITHIN
    return UNASKED_WITHIN if plan.explored and not known else ASKED_WITHIN


def is_needed(plan: ArmPlan, costs: Mapping[str, Cost]) -> bool:
    """Whether a report cannot do without the arm."""
    return plan.name in NEEDED or (is_conversion(plan.name) and not any(map(is_conversion, costs)))


def is_first_bf16(plan: ArmPlan, attempts: Sequence[Attempt]) -> bool:
    """Whether the arm is the first BF16, without which a trial says nothing."""
    return plan.name in BF16_BASELINES and not any(
        each.plan.name in BF16_BASELINES and each.ready for each in attempts
    )


def _expected(plan: ArmPlan, costs: Mapping[str, Cost], run: TrialRun) -> Cost | None:
    """Estimate what the arm will cost: less where others have compiled it."""
    cost = _expected_alone(plan, costs)
    took_s = run.ahead.took_s(plan.name)
    return cost if cost is None or took_s is None else ahead_of(cost, took_s)


def _expected_alone(plan: ArmPlan, costs: Mapping[str, Cost]) -> Cost | None:
    return expected(costs, plan.base, name=plan.name, compiles=plan.compiled, fp8=plan.fp8)


def worth_waiting_after_s(plan: ArmPlan, attempts: Sequence[Attempt]) -> float:
    """Return the seconds that others have to have been at an arm for waiting to be sooner than compiling it
    too: as many as what they leave in the caches costs the trial then."""
    cost = _expected_alone(plan, costs_of(attempts))
    return AHEAD_SHARE * cost.build_s if cost else 0.0


def worth_waiting_s(plan: ArmPlan, attempts: Sequence[Attempt]) -> float:
    """Return the seconds that what others leave in the caches can save the trial: to wait any longer never
    pays."""
    cost = _expected_alone(plan, costs_of(attempts))
    return (1.0 - AHEAD_SHARE) * cost.build_s if cost else 0.0


def costs_of(attempts: Sequence[Attempt]) -> dict[str, Cost]:
    """Collect what the arms that were built have cost: what others compiled as much as it took them, which is
    what tells of an arm that nobody compiled yet."""
    return {
        each.plan.name: Cost(
            max(each.build_s, *(ready.warm_up_s for ready in each.ready)),
            tuple(ready.step_s for ready in each.ready),
            any(_compiled(ready) for ready in each.ready),
            bool(each.plan.fp8),
            each.plan.by_block,
        )
        for each in attempts
        if each.ready
    }


def enough_for_all_s(attempts: Sequence[Attempt], run: TrialRun) -> float | None:
    """Return the budget in which nothing would be left out for time, though the caches hold nothing of it;
    None where nothing is, or where nobody knows."""
    spent_s, costs = run.budget.elapsed_s, costs_of(attempts)
    anew = {
        each.plan.name: compiled_anew(costs[each.plan.name], sum(ready.from_caches_s for ready in each.ready))
        for each in attempts
        if each.ready
    }
    left: dict[str, Cost] = {}
    for attempt in attempts:
        if attempt.why in LEFT_OUT_FOR_TIME:
            cost = _expected(attempt.plan, {**anew, **left}, run)
            if cost is None:
                return None
            left[attempt.plan.name] = replace(cost, build_s=max(cost.build_s, 2 * attempt.build_s))
    explored = [each.plan.name for each in attempts if explores(each.plan)]
    return run.budget.enough_s(costs, left, explored, spent_s) if left else None


def _compiled(ready: Ready) -> bool:
    return ready.compiled.graphs is not NOT_RECORDED and ready.compiled.graphs > 0
