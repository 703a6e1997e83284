"""What the rest of a trial takes, and whether an arm still fits: arithmetic over what the arms before it
cost.

An arm costs more than its build: its steps in every round of the window, and its proof. Before an optional
arm is begun, time is kept for the least window, the profiles of what is compared, the numerics and the end.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

from fp8doctor.analysis.arms import BF16_WITH
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, changes_recipe
from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    LEFT_OUT_FOR_TIME,
    ArmName,
    Reason,
    is_conversion,
)
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.variant import ArmPlan, explores

WITHIN = 1.25
"""Budgets within which the whole command ends: the one hard deadline. The conductor starts no variant that is
not expected to end by then, gives up a build that takes longer, and the parent process ends a child that
overstays. The project's bound."""

LEAST_SHARE = 0.5
"""Share of the budget that the trial has however long the import and the load took, which count otherwise. A
choice: a model that loads for minutes is timed too."""

REPORT_S, CLOSING_S, ENDING_SHARE = 4.0, 1.2, 0.12
"""Seconds kept for the end of the process and the report, seconds kept before for letting go of everything,
and the share of a small budget that both are at most. A process that lets go of a GPU has 2 s
(`fp8doctor.worker.parent.GRACE_S`)."""

ASKED_WITHIN = 1.05
"""Budgets within which a finding's own proposal is expected to fit, and what no finding proposes in one. The
rest of the trial is rather overestimated, and a proposal that is timed alone is worth a few seconds."""

NUMERICS_SHARE = 0.04
"""Share of the budget for the numerics and the loss, if they can say something. 11 jobs took 0.6 to 2.6 s of
60 or 120 s."""

WINDOW_SHARE = 0.2
"""Share of the budget in which rounds are added to the least ones where what they are taken for is decided. A
choice: with 15 rounds instead of 6 a Llama 3B was predicted no better (0.3 to 1.5 % off, and 1.0 to 1.7), and
its trial took 16 s longer (H200, torch 2.11)."""

DEARER_RECIPE = 1.5
"""Time to build the first other recipe / time to build the arm that it changes. Rowwise compiled 1.2 to 1.6
times as long as tensorwise in five models on an H200 (torch 2.11)."""

DEARER_FP8 = 2.5
"""Time to build compiled FP8 / compiled BF16: 1.5 to 3.5, in the median 2.6 of nine models on an H200 (torch
2.11)."""

CACHED_SHARE = 0.13
"""Time to compile with everything in the caches / without, at the least. The blocks of a Llama 3B took 0.13
in BF16, 0.24 and 0.18 in FP8, tensorwise and rowwise (H200, torch 2.11)."""

LEAST_WARM_UP = 3
"""Steps of an arm before it is timed, at least; so many where the first finds everything compiled."""

PROFILE_STEPS, PROFILE_S, PROOF_STEPS = 6.0, 0.3, 3.0
"""A profile takes so many steps and seconds at each cut (seen: 3 to 9 steps; warming up, tracing, reading), a
plain proof so many steps of the deepest (1.3 to 4)."""

BLOCKWISE_SHARE = 0.3
"""Time to build block by block / time to build as one graph: 8 blocks take 8 s and 30 s, 24 blocks 8 s and 72
to 93 s (FP8, one H200, torch 2.11)."""


@dataclass(frozen=True)
class Cost:
    """What an arm has cost, or is expected to."""

    build_s: float
    steps_s: tuple[float, ...]
    """One step at each cut."""
    compiles: bool = False
    fp8: bool = False
    by_block: bool = False
    """Whether it compiles single blocks, in place of the user's own marks."""


@dataclass(frozen=True)
class Budget:
    """The seconds of one command, or of one trial in a user's process."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())
    """On ``time.monotonic``."""
    uncounted_s: float = 0.0
    """Seconds of the load before that, which do not count."""
    numerics: bool = False
    """Whether the numerics can say something, so that time is kept for them."""
    noted_s: float = 0.0
    """Seconds that noting the state of the model took, which is looked at once more at the end."""

    @classmethod
    def since(cls, began: float, seconds: float, deadline: float | None = None) -> Budget:
        """Make the budget of a command that began at this clock, for the trial that begins now: what was done
        before counts, but leaves the trial `LEAST_SHARE`.

        A trial that begins again has the ``deadline`` of the first, whatever that leaves.
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
        return self.began + WITHIN * self.seconds

    @property
    def deadline(self) -> float:
        """The clock at which the parent process ends the trial, to report what was sent."""
        return self.last - self._at_most(REPORT_S)

    @property
    def elapsed_s(self) -> float:
        """The seconds since the command began."""
        return self.spent_s + self.uncounted_s

    @property
    def open_sign_s(self) -> float:
        """The seconds by which a window may go on while it does not tell FP8 from BF16."""
        return self.last - self.end

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def used_up(self) -> NoNumber:
        """Make the reason for what it leaves no time for."""
        return NoNumber(Reason.NO_TIME_LEFT, f"the budget of {self.seconds:g} s ran out")

    def too_short(self, takes_s: float) -> NoNumber:
        """Make the reason for what is not expected to fit into its rest."""
        return NoNumber(
            Reason.NOT_EXPECTED_TO_FIT,
            f"the budget of {self.seconds:g} s has no room for the {max(1.0, takes_s):.0f} s that it takes",
        )

    @property
    def numerics_share(self) -> float:
        """The share that is kept for the numerics."""
        return NUMERICS_SHARE if self.numerics else 0.0

    def closing_s(self) -> float:
        """Sum up the numerics and the end."""
        return self.seconds * self.numerics_share + self._ending_s

    @property
    def _ending_s(self) -> float:
        """The seconds kept for the end, after the numerics."""
        return self._at_most(CLOSING_S + REPORT_S) + self.noted_s

    def _at_most(self, seconds: float) -> float:
        """Take a part of the seconds kept for the end; less of a small budget."""
        return seconds * min(1.0, ENDING_SHARE * self.seconds / (CLOSING_S + REPORT_S))

    def after_window_s(self, costs: Mapping[str, Cost]) -> float:
        """Sum up what follows the window."""
        profiled = compared(costs)
        proven = [cost for name, cost in costs.items() if name not in profiled and name != ArmName.SELF_CHECK]
        return (
            sum(map(profile_s, profiled.values()))
            + sum(PROOF_STEPS * cost.steps_s[-1] for cost in proven)
            + self.closing_s()
        )

    def takes_s(self, cost: Cost, name: str, costs: Mapping[str, Cost]) -> float:
        """Sum up what one more arm takes beside those that were built: its build, its share of the least
        window, and its profiles or proof."""
        every = {**costs, name: cost}
        after = self.after_window_s(every) - self.after_window_s(costs)
        return cost.build_s + timer.LEAST_ROUNDS * round_s([cost]) + max(0.0, after)

    def fits(
        self, cost: Cost, name: str, costs: Mapping[str, Cost], spent_s: float, *, within: float
    ) -> bool:
        """Whether one more arm, beside those that were built, can be built and timed within so many
        budgets."""
        return spent_s + cost.build_s + self.after_builds_s({**costs, name: cost}) <= within * self.seconds

    def after_builds_s(self, costs: Mapping[str, Cost]) -> float:
        """Sum up the least window and what follows it."""
        return timer.LEAST_ROUNDS * round_s(costs.values()) + self.after_window_s(costs)

    def build_until(self, costs: Mapping[str, Cost]) -> float:
        """Return the clock at which the build of an arm is given up, so that what is in ``costs``, as the arm
        itself, can be timed. While no step is known, half of the time beyond the budget is kept for that."""
        if not costs:
            return (self.end + self.last) / 2 - self.closing_s()
        return self.last - self.after_builds_s(costs)

    def enough_s(
        self, costs: Mapping[str, Cost], left: Mapping[str, Cost], explored: Iterable[str], spent_s: float
    ) -> float:
        """Return the budget in which the arms that were left out are built and timed too, ``spent_s`` being
        the seconds until all others were built.

        What is put together of those that gained is in it, and the end of a budget that is not small. In
        steps of ten seconds.
        """
        every = {**costs, **left}
        builds_s = sum(cost.build_s for cost in left.values())
        whole_s = spent_s + builds_s + self.after_builds_s(every) + final_s(every, explored)
        parts = whole_s - self.closing_s() + CLOSING_S + self.noted_s + REPORT_S
        return 10.0 * math.ceil(parts / (1.0 - self.numerics_share) / 10.0)

    def window_until(self, costs: Mapping[str, Cost], explored: Iterable[str]) -> float:
        """Return the clock until which rounds are added to the least ones."""
        return self.end - self.after_window_s(costs) - final_s(costs, explored)

    def window_soon(self) -> float:
        """Return the clock until which rounds are added where they are not needed to decide."""
        return time.monotonic() + WINDOW_SHARE * self.seconds

    def final_fits(self, costs: Mapping[str, Cost], explored: Iterable[str], spent_s: float) -> bool:
        """Whether what gained can be put together and timed."""
        return self.began + spent_s + final_s(costs, explored) + self.closing_s() <= self.end

    def window_latest(self, costs: Mapping[str, Cost]) -> float:
        """Return the clock after which not even the least rounds go on. They are worth more than profiles,
        and nothing without proofs."""
        proofs_s = sum(PROOF_STEPS * cost.steps_s[-1] for cost in costs.values())
        return self.last - proofs_s - self.closing_s()

    def profile_fits(self, cost: Cost) -> bool:
        """Whether an arm can be profiled at every cut before the end."""
        return time.monotonic() + profile_s(cost) <= self.last - self.closing_s()

    def numerics_until(self) -> float:
        """Return the clock after which no layer is compared any more, so that the end is in time too."""
        until = max(self.end - self._ending_s, time.monotonic() + NUMERICS_SHARE * self.seconds)
        return min(until, self.last - self._ending_s)


def round_s(costs: Iterable[Cost]) -> float:
    """Sum up one round of the window."""
    return sum(
        visit.steps * step
        for cost in costs
        for step, visit in zip(cost.steps_s, timer.visits([1e3 * step for step in cost.steps_s]), strict=True)
    )


def profile_s(cost: Cost) -> float:
    """Sum up the profiles of one arm, at every cut."""
    return sum(PROFILE_S + PROFILE_STEPS * step for step in cost.steps_s)


def compared(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Name what will be profiled: as it is, the fastest BF16, and the prescription or the fastest
    conversion."""
    groups = ([ArmName.AS_IS], BF16_BASELINES, [ArmName.PRESCRIBED], filter(is_conversion, costs))
    fastest = (
        min((name for name in group if name in costs), key=lambda name: costs[name].steps_s[-1], default=None)
        for group in groups
    )
    return {name: costs[name] for name in fastest if name is not None}


def expected(
    costs: Mapping[str, Cost], base: str | None, *, name: str, compiles: bool, fp8: bool | None = None
) -> Cost | None:
    """Estimate what the arm ``name`` will cost: as much as its ``base``, or as the dearest that compiles when
    it compiles too; its steps then take as long as those of the fastest that does.

    ``fp8`` says whether it runs in FP8; None as its base does. Compiling blocks costs a part of a base that
    is compiled as one graph, and what changes such an arm is held to others by block. FP8 costs more than
    BF16, and another recipe as much as the last one, which was dearer than the base. The copy of BF16 costs
    what BF16 did, at its one cut. None when there is nothing to go by.
    """
    copied = costs.get(ArmName.BF16)
    if name == ArmName.SELF_CHECK and copied:
        return replace(copied, steps_s=copied.steps_s[:1])
    like = costs.get(base or ArmName.AS_IS) or costs.get(ArmName.AS_IS)
    if like is None:
        return None
    if name == ArmName.BF16:  # which compiles nothing, whatever the step as it is does
        eager_s = min(like.build_s, LEAST_WARM_UP * sum(like.steps_s))
        return Cost(eager_s, like.steps_s)
    if name == COMPILE_BLOCKS and like.compiles:
        return Cost(BLOCKWISE_SHARE * like.build_s, like.steps_s, like.compiles, like.fp8, by_block=True)
    recipes = [cost.build_s for other, cost in costs.items() if changes_recipe(other)]
    if changes_recipe(name) and recipes:
        return Cost(max(recipes), like.steps_s, like.compiles, like.fp8, like.by_block)
    compiles, fp8 = compiles or like.compiles, like.fp8 if fp8 is None else fp8
    alike = [
        cost
        for cost in costs.values()
        if compiles and cost.compiles and (fp8 or not cost.fp8) and (cost.by_block or not like.by_block)
    ]
    dearer = DEARER_FP8 if fp8 and not any(cost.fp8 for cost in alike) else 1.0
    of_base = like.build_s / (DEARER_FP8 if like.compiles and like.fp8 and not fp8 else 1.0)
    build_s = max(of_base, *(dearer * cost.build_s for cost in alike), 0.0)
    build_s *= DEARER_RECIPE if changes_recipe(name) else 1.0
    steps_s = min((like, *([] if like.compiles else alike)), key=lambda cost: cost.steps_s).steps_s
    return Cost(build_s, steps_s, compiles, fp8, like.by_block)


def compiled_anew(cost: Cost, from_caches_s: float) -> Cost:
    """Raise the cost of an arm to what it takes where the caches hold nothing of it, as they hold nothing of
    an arm that was never built. So many seconds were spent on graphs that all came from there."""
    steps_s = LEAST_WARM_UP * sum(cost.steps_s)
    if not from_caches_s:
        return cost
    return replace(cost, build_s=max(cost.build_s, steps_s + from_caches_s / CACHED_SHARE))


def final_s(costs: Mapping[str, Cost], explored: Iterable[str]) -> float:
    """Sum up the window of what gained together, the best of it and BF16 in each of its forms; 0 where fewer
    than two can have gained."""
    tried = [costs[name] for name in explored if name in costs]
    if len(tried) < 2:
        return 0.0
    best = min(tried, key=lambda cost: cost.steps_s[-1])
    baselines = [costs[name] for name in (*BASELINES, *BF16_WITH.values()) if name in costs]
    return (
        max(cost.build_s for cost in tried)
        + timer.LEAST_ROUNDS * round_s([*baselines, best, best])
        + 2 * profile_s(best)
    )


NEEDED = (*BASELINES, ArmName.PRESCRIBED, ArmName.SELF_CHECK)
"""Arms that a report cannot do without. The first conversion of a model without FP8 is needed too."""


def no_time_for(plan: ArmPlan, attempts: Sequence[Attempt], budget: Budget) -> NoNumber | None:
    """Tell why the arm may not be begun: it has to end in time by what it is expected to take, the first BF16
    by what is left for its build."""
    costs = costs_of(attempts)
    until = build_until(plan, attempts, budget) if is_needed(plan, costs) else budget.end
    if budget.began + budget.spent_s >= until:
        return budget.used_up
    cost = _expected(plan, costs)
    if is_first_bf16(plan, attempts) or cost is None:
        return None
    if budget.fits(cost, plan.name, costs, budget.spent_s, within=_within(plan, costs)):
        return None
    return budget.too_short(budget.takes_s(cost, plan.name, costs))


def build_until(plan: ArmPlan, attempts: Sequence[Attempt], budget: Budget) -> float:
    """Return the clock at which the build of the arm is given up, so that it and all others can be timed."""
    costs = costs_of(attempts)
    cost = _expected(plan, costs)
    return budget.build_until({**costs, plan.name: cost} if cost else costs)


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


def enough_for_all_s(attempts: Sequence[Attempt], budget: Budget) -> float | None:
    """Return the budget in which nothing would be left out for time, though the caches hold nothing of it;
    None where nothing is, or where nobody knows."""
    spent_s, costs = budget.elapsed_s, costs_of(attempts)
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
    return budget.enough_s(costs, left, explored, spent_s) if left else None


def _compiled(ready: Ready) -> bool:
    return ready.compiled.graphs is not NOT_RECORDED and ready.compiled.graphs > 0


AGAIN_S = 1.0
"""Seconds after which it is raised again, where what it was raised in swallowed it, as a destructor does."""


class Overrun(BaseException):
    """The time of a build is over. No `Exception`: the compiler takes those for failures of its own."""


@contextmanager
def given_up(at: float, *, interrupts: bool) -> Iterator[None]:
    """Raise `Overrun` inside when the clock (``time.monotonic``) passes ``at``.

    Only in the main thread, where signals are handled, and only with ``interrupts``: a user's process has
    alarms of its own. What runs in C++ then is waited for.
    """
    in_time = at - time.monotonic()
    if not interrupts or math.isinf(at) or threading.current_thread() is not threading.main_thread():
        yield
        return

    armed = [True]

    def over(number: int, frame: FrameType | None) -> None:
        if armed:
            raise Overrun

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(in_time, 1e-3), AGAIN_S)
        yield
    finally:
        try:
            armed.clear()
        finally:  # the alarm may come before that
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
