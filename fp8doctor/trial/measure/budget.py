"""Budget a trial: estimate what each variant costs, and decide if it is built.

Variants come in the order of their importance. Each costs its build, its steps in every round, and its proof
or profile. One that the report needs may use the time up to the hard deadline; every other has to fit into
the budget, next to the least rounds and all that follows them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, changes_recipe
from fp8doctor.facts.arm_names import (
    BF16_BASELINES,
    LEFT_OUT_FOR_TIME,
    ArmName,
    Reason,
    is_conversion,
    is_in_bf16,
)
from fp8doctor.facts.no_number import NoNumber, did_not_fit
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.variant import VariantPlan

HARD_LIMIT = 1.25
"""Budgets within which the whole command ends: no variant is begun that is not expected to end by then, a
build that takes longer is given up, and the parent process ends a child that overstays. The project's
bound."""

PROPOSAL_LIMIT = 1.05
"""Budgets within which a finding's own proposal is expected to fit; what no finding proposes has to fit into
one. Estimates are rather high: with 1.0 a recorded Llama with LoRA times one proposal less, and with 1.05 for
all variants a recorded Mixtral takes longer than its budget (H200, tests/trial/recorded_trials.py)."""

LEAST_SHARE = 0.5
"""Share of the budget that the trial has however long the import and the load took. A choice: a model that
loads for minutes is timed too."""

REPORT_S, CLOSING_S, ENDING_SHARE = 4.0, 1.2, 0.12
"""Seconds kept for the report, seconds kept before it to let go of the GPU, and the share of a small budget
that both are at most. A process that lets go of a GPU has 2 s (`fp8doctor.worker.parent.GRACE_S`)."""

NUMERICS_SHARE = 0.04
"""Share of the budget for the numerics and the loss, if they can say something. 11 jobs took 0.6 to 2.6 s of
60 or 120 s."""

ROUNDS_SHARE = 0.2
"""Share of the budget for rounds that nothing depends on. With 15 rounds instead of 6 a Llama 3B was
predicted no better (0.3 to 1.5% off, and 1.0 to 1.7), and took 16 s longer (H200, torch 2.11)."""

RECIPE_BUILD = 1.5
"""Build time of another recipe / of its base: 1.2 to 1.6 for rowwise in five models (H200, torch 2.11)."""

FP8_BUILD = 2.5
"""Build time of compiled FP8 / compiled BF16: 1.5 to 3.5, median 2.6 of nine models (H200, torch 2.11)."""

BLOCKWISE_BUILD = 0.3
"""Build time block by block / as one graph: 8 s and 30 s for 8 blocks, 8 s and 72 to 93 s for 24 (FP8, H200,
torch 2.11)."""

CACHED_BUILD = 0.13
"""Least compile time with everything in the caches / without: 0.13 for the blocks of a Llama 3B in BF16, 0.18
to 0.24 in FP8 (H200, torch 2.11)."""

LEAST_WARM_UP = 3
"""Least steps of a variant before it is timed."""

PROFILE_STEPS, PROFILE_S, PROOF_STEPS = 6.0, 0.3, 3.0
"""Steps and seconds of a profile at each depth (seen: 3 to 9 steps, with warm-up and reading), and steps of a
plain proof at the deepest (1.3 to 4)."""


@dataclass(frozen=True)
class Cost:
    """What a variant has cost, or is expected to."""

    build_s: float
    steps_s: tuple[float, ...]
    """One step at each depth."""
    compiles: bool = False
    fp8: bool = False
    by_block: bool = False
    """Whether it compiles single blocks, in place of the user's own marks."""

    @property
    def profile_s(self) -> float:
        """Seconds of a profile at every depth."""
        return sum(PROFILE_S + PROFILE_STEPS * step for step in self.steps_s)


@dataclass(frozen=True)
class Budget:
    """The seconds of one command, or of one trial in a user's process."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())
    """On ``time.monotonic``, as all clocks here."""
    uncounted_s: float = 0.0
    """Seconds of the load before that, which do not count."""
    numerics: bool = False
    """Whether the numerics can say something, so that time is kept for them."""
    noted_s: float = 0.0
    """Seconds that noting the model's state took; it is compared with once more at the end."""

    @classmethod
    def since(cls, began: float, seconds: float, deadline: float | None = None) -> Budget:
        """Make the budget of a command that began at this clock for a trial that begins.

        What was done before counts, but leaves the trial `LEAST_SHARE`. A trial that begins again has the
        ``deadline`` of the first, whatever that leaves.
        """
        counted = max(began, time.monotonic() - (1.0 - LEAST_SHARE) * seconds)
        first = cls(seconds, counted, uncounted_s=counted - began)
        if deadline is None or first.deadline <= deadline:
            return first
        earlier_s = first.deadline - deadline
        return cls(seconds, counted - earlier_s, uncounted_s=first.uncounted_s - earlier_s)

    @property
    def end(self) -> float:
        return self.began + self.seconds

    @property
    def last(self) -> float:
        """The clock at which the whole command has to be over."""
        return self.began + HARD_LIMIT * self.seconds

    @property
    def deadline(self) -> float:
        """The clock at which the parent process ends the trial, to report what was sent."""
        return self.last - self._at_most(REPORT_S)

    @property
    def overtime_s(self) -> float:
        """The seconds by which rounds may go on while they do not tell FP8 from BF16."""
        return self.last - self.end

    @property
    def elapsed_s(self) -> float:
        """The seconds since the command began."""
        return time.monotonic() - self.began + self.uncounted_s

    @property
    def used_up(self) -> NoNumber:
        """The reason of a variant that no time was left for."""
        return NoNumber(Reason.NO_TIME_LEFT, did_not_fit(self.seconds))

    @property
    def too_short(self) -> NoNumber:
        """The reason of a variant that is not expected to fit next to all that has to follow."""
        return NoNumber(Reason.NOT_EXPECTED_TO_FIT, did_not_fit(self.seconds))

    def closing_s(self) -> float:
        """Sum up the numerics and the end."""
        return self.seconds * self._numerics_share + self._ending_s

    @property
    def _numerics_share(self) -> float:
        return NUMERICS_SHARE if self.numerics else 0.0

    @property
    def _ending_s(self) -> float:
        return self._at_most(CLOSING_S + REPORT_S) + self.noted_s

    def _at_most(self, seconds: float) -> float:
        """Take less of a small budget for the end."""
        return seconds * min(1.0, ENDING_SHARE * self.seconds / (CLOSING_S + REPORT_S))

    def after_rounds_s(self, costs: Mapping[str, Cost]) -> float:
        """Sum up what follows the rounds: profiles, proofs, and the end."""
        profiled = compared(
            {name: cost.steps_s[-1] for name, cost in costs.items()},
            [name for name, cost in costs.items() if cost.fp8],
        )
        proven = [cost for name, cost in costs.items() if name not in profiled and name != ArmName.SELF_CHECK]
        return (
            sum(costs[name].profile_s for name in profiled)
            + sum(PROOF_STEPS * cost.steps_s[-1] for cost in proven)
            + self.closing_s()
        )

    def after_builds_s(self, costs: Mapping[str, Cost]) -> float:
        """Sum up the least rounds and what follows them."""
        return timer.LEAST_ROUNDS * round_s(costs.values()) + self.after_rounds_s(costs)

    def fits(self, cost: Cost, name: str, costs: Mapping[str, Cost], by: float) -> bool:
        """Return whether one more variant, built now, leaves time for all that follows."""
        return time.monotonic() + cost.build_s + self.after_builds_s({**costs, name: cost}) <= by

    def build_until(self, costs: Mapping[str, Cost]) -> float:
        """Return the clock at which a build is given up, to time what is in ``costs``.

        While no step is known, half of the time beyond the budget is kept for that.
        """
        if not costs:
            return (self.end + self.last) / 2 - self.closing_s()
        return self.last - self.after_builds_s(costs)

    def rounds_until(self, costs: Mapping[str, Cost]) -> float:
        """Return the clock until which rounds are added to the least ones."""
        return self.end - self.after_rounds_s(costs)

    def rounds_soon(self) -> float:
        """Return the clock until which rounds are added that nothing depends on."""
        return time.monotonic() + ROUNDS_SHARE * self.seconds

    def rounds_latest(self, costs: Mapping[str, Cost]) -> float:
        """Return the clock at which even the least rounds end, to keep time for proofs."""
        proofs_s = sum(PROOF_STEPS * cost.steps_s[-1] for cost in costs.values())
        return self.last - proofs_s - self.closing_s()

    def profile_fits(self, cost: Cost) -> bool:
        """Return whether a variant can be profiled at every depth before the end."""
        return time.monotonic() + cost.profile_s <= self.last - self.closing_s()

    def numerics_until(self) -> float:
        """Return the clock after which no further layer is compared."""
        until = max(self.end - self._ending_s, time.monotonic() + NUMERICS_SHARE * self.seconds)
        return min(until, self.last - self._ending_s)

    def enough_s(self, costs: Mapping[str, Cost], left: Mapping[str, Cost]) -> float:
        """Return the budget, in tens of seconds, that is enough for those ``left`` out."""
        every = {**costs, **left}
        builds_s = sum(cost.build_s for cost in left.values())
        whole_s = self.elapsed_s + builds_s + self.after_builds_s(every)
        parts = whole_s - self.closing_s() + CLOSING_S + self.noted_s + REPORT_S
        return 10.0 * math.ceil(parts / (1.0 - self._numerics_share) / 10.0)


def round_s(costs: Iterable[Cost]) -> float:
    """Sum up one round."""
    return sum(
        block.steps * step
        for cost in costs
        for step, block in zip(cost.steps_s, timer.blocks([1e3 * step for step in cost.steps_s]), strict=True)
    )


def compared(times: Mapping[str, float], in_fp8: Sequence[str]) -> list[str]:
    """Name the step as it is, the fastest BF16, and the fastest other FP8, which are profiled."""
    others = (ArmName.AS_IS, ArmName.SELF_CHECK, ArmName.WITHOUT_ADAPTERS)
    fp8 = [name for name in in_fp8 if name not in others]
    groups = ([name for name in group if name in times] for group in ([ArmName.AS_IS], BF16_BASELINES, fp8))
    return [min(group, key=times.__getitem__) for group in groups if group]


def expected(plan: VariantPlan, costs: Mapping[str, Cost]) -> Cost | None:
    """Estimate what a variant will cost by those that were built; None without any.

    It costs as much as its base. If it compiles, it costs as much as the slowest build of its like: FP8 or
    BF16, block by block or as one graph. Then its steps take as long as those of the fastest.
    """
    copied = costs.get(ArmName.BF16)
    if plan.name == ArmName.SELF_CHECK and copied:
        return replace(copied, steps_s=copied.steps_s[:1])
    like = costs.get(plan.base or ArmName.AS_IS) or costs.get(ArmName.AS_IS)
    if like is None:
        return None
    if plan.name == ArmName.BF16:  # compiles nothing, whatever the step as it is does
        return Cost(min(like.build_s, LEAST_WARM_UP * sum(like.steps_s)), like.steps_s)
    if plan.name == COMPILE_BLOCKS and like.compiles:
        return replace(like, build_s=BLOCKWISE_BUILD * like.build_s, by_block=True)
    recipes = [cost.build_s for other, cost in costs.items() if changes_recipe(other)]
    if changes_recipe(plan.name) and recipes:
        return replace(like, build_s=max(recipes))
    compiles, fp8 = plan.compiled or like.compiles, like.fp8 if plan.fp8 is None else plan.fp8
    alike = [
        cost
        for cost in costs.values()
        if compiles and cost.compiles and (fp8 or not cost.fp8) and (cost.by_block or not like.by_block)
    ]
    slower = FP8_BUILD if fp8 and not any(cost.fp8 for cost in alike) else 1.0
    of_base = like.build_s / (FP8_BUILD if like.compiles and like.fp8 and not fp8 else 1.0)
    build_s = max(of_base, *(slower * cost.build_s for cost in alike), 0.0)
    build_s *= RECIPE_BUILD if changes_recipe(plan.name) else 1.0
    steps_s = min((like, *([] if like.compiles else alike)), key=lambda cost: cost.steps_s).steps_s
    return Cost(build_s, steps_s, compiles, fp8, like.by_block)


def no_time_for(plan: VariantPlan, attempts: Sequence[Attempt], budget: Budget) -> NoNumber | None:
    """Explain why a variant is not begun; None if it is.

    The first BF16 is begun as long as its build has time, whatever it is expected to take.
    """
    costs = costs_of(attempts)
    cost, needed = expected(plan, costs), is_needed(plan, costs)
    if time.monotonic() >= (build_until(plan, attempts, budget) if needed else budget.end):
        return budget.used_up
    first_bf16 = plan.name in BF16_BASELINES and not any(name in BF16_BASELINES for name in costs)
    if first_bf16 or cost is None:
        return None
    limit = HARD_LIMIT if needed else 1.0 if plan.explored else PROPOSAL_LIMIT
    fits = budget.fits(cost, plan.name, costs, budget.began + limit * budget.seconds)
    return None if fits else budget.too_short


def build_until(plan: VariantPlan, attempts: Sequence[Attempt], budget: Budget) -> float:
    """Return the clock at which the variant's build is given up, to time all others."""
    costs = costs_of(attempts)
    cost = expected(plan, costs)
    return budget.build_until({**costs, plan.name: cost} if cost else costs)


def is_needed(plan: VariantPlan, costs: Mapping[str, Cost]) -> bool:
    """Return whether a report cannot do without the variant.

    That is the step as it is, every BF16 and the whole plan, or the first conversion of a model without FP8.
    """
    if is_conversion(plan.name):
        return not any(map(is_conversion, costs))
    decides = plan.name in (ArmName.AS_IS, ArmName.PRESCRIBED) or is_in_bf16(plan.name)
    return decides and not plan.explored


def costs_of(attempts: Sequence[Attempt]) -> dict[str, Cost]:
    """Collect what the variants that were built have cost."""
    return {
        each.plan.name: Cost(
            each.build_s,
            tuple(ready.step_s for ready in each.ready),
            any(map(_compiled, each.ready)),
            bool(each.plan.fp8),
            each.plan.by_block,
        )
        for each in attempts
        if each.ready
    }


def _compiled(ready: Ready) -> bool:
    return ready.compiled.graphs is not NOT_RECORDED and ready.compiled.graphs > 0


def enough_for_the_rest_s(attempts: Sequence[Attempt], budget: Budget) -> float | None:
    """Return the budget for the variants that were left out for time: those that decide, if any, else all.

    It does not count on the compiler's caches. A build that was given up has twice its time: what it took is
    in the elapsed seconds, and comes once more. None if none was left out, or that is not known.
    """
    costs = costs_of(attempts)
    anew = {each.plan.name: _compiled_anew(each, costs) for each in attempts if each.ready}
    left: dict[str, Cost] = {}
    for attempt in attempts:
        if attempt.why in LEFT_OUT_FOR_TIME:
            cost = expected(attempt.plan, {**anew, **left})
            if cost is None:
                return None
            left[attempt.plan.name] = replace(cost, build_s=max(cost.build_s, attempt.build_s))
    decide = {each.plan.name for each in attempts if is_needed(each.plan, costs)}
    needed = {name: cost for name, cost in left.items() if name in decide}
    return budget.enough_s(costs, needed or left) if left else None


def _compiled_anew(attempt: Attempt, costs: Mapping[str, Cost]) -> Cost:
    """Return the cost of a variant as if the caches had been empty."""
    cost, cached_s = costs[attempt.plan.name], sum(ready.from_caches_s for ready in attempt.ready)
    if not cached_s:
        return cost
    compiled_s = LEAST_WARM_UP * sum(cost.steps_s) + cached_s / CACHED_BUILD
    return replace(cost, build_s=max(cost.build_s, compiled_s))
