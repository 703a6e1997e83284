"""Whether an arm may still be begun: what it is expected to cost, held to what is left of the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    ASKED_WITHIN,
    WITHIN,
    Cost,
    compiled_anew,
    expected,
)
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.variant import ArmPlan, explores

NEEDED = (*BASELINES, ArmName.PRESCRIBED, ArmName.SELF_CHECK)
"""Arms that a report cannot do without. The first conversion of a model without FP8 is needed too."""


def no_time_for(plan: ArmPlan, attempts: Sequence[Attempt], run: TrialRun) -> NoNumber | None:
    """Tell why the arm may not be begun: it has to end in time by what it is expected to take, the first BF16
    by what is left for its build."""
    budget, costs = run.budget, costs_of(attempts)
    until = build_until(plan, attempts, run) if is_needed(plan, costs) else budget.end
    if budget.began + budget.spent_s >= until:
        return budget.used_up
    cost = _expected(plan, costs)
    if is_first_bf16(plan, attempts) or cost is None:
        return None
    if budget.fits(cost, plan.name, costs, budget.spent_s, within=_within(plan, costs)):
        return None
    return budget.too_short(budget.takes_s(cost, plan.name, costs))


def build_until(plan: ArmPlan, attempts: Sequence[Attempt], run: TrialRun) -> float:
    """Return the clock at which the build of the arm is given up, so that it and all others can be timed."""
    costs = costs_of(attempts)
    cost = _expected(plan, costs)
    return run.budget.build_until({**costs, plan.name: cost} if cost else costs)


def _within(plan: ArmPlan, costs: Mapping[str, Cost]) -> float:
    """Choose the budgets within which the arm has to fit."""
    if is_needed(plan, costs):
        return WITHIN
    return 1.0 if plan.explored else ASKED_WITHIN


def is_needed(plan: ArmPlan, costs: Mapping[str, Cost]) -> bool:
    """Whether a report cannot do without the arm."""
    return plan.name in NEEDED or (is_conversion(plan.name) and not any(map(is_conversion, costs)))


def is_first_bf16(plan: ArmPlan, attempts: Sequence[Attempt]) -> bool:
    """Whether the arm is the first BF16, without which a trial says nothing."""
    return plan.name in BF16_BASELINES and not any(
        each.plan.name in BF16_BASELINES and each.ready for each in attempts
    )


def _expected(plan: ArmPlan, costs: Mapping[str, Cost]) -> Cost | None:
    return expected(costs, plan.base, name=plan.name, compiles=plan.compiled, fp8=plan.fp8)


def costs_of(attempts: Sequence[Attempt]) -> dict[str, Cost]:
    """Collect what the arms that were built have cost."""
    return {
        each.plan.name: Cost(
            each.build_s,
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
            cost = _expected(attempt.plan, {**anew, **left})
            if cost is None:
                return None
            left[attempt.plan.name] = replace(cost, build_s=max(cost.build_s, 2 * attempt.build_s))
    explored = [each.plan.name for each in attempts if explores(each.plan)]
    return run.budget.enough_s(costs, left, explored, spent_s) if left else None


def _compiled(ready: Ready) -> bool:
    return ready.compiled.graphs is not NOT_RECORDED and ready.compiled.graphs > 0
