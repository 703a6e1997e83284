"""What the rest of a trial takes, and whether an arm still fits: arithmetic over what the arms before it
cost.

An arm costs more than its build: its steps in every round of the window, and its proof. Before an optional
arm is begun, time is kept for the least window, the profiles of what is compared, the numerics and the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, Reason, is_conversion
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.measure import timer

MUST_BEGIN_SHARE = 0.6
"""Share of the budget after which only the arms of `BEGUN_LATE` are begun; what they compile may end later. A
convention of this tool, as `LATEST` and `LAST_PROFILE` are."""

BEGUN_LATE: dict[str, float] = {
    ArmName.BF16: 2.0,
    ArmName.BF16_COMPILED: 2.0,
    ArmName.BF16_AS_COMPILED: 2.0,
    ArmName.PRESCRIBED: 1.0,
    ArmName.SELF_CHECK: 1.0,
}
"""How late each essential arm may still start, in multiples of the budget. One graph of 24 FP8 blocks
compiles for 80 s, and that step alone says nothing. The copy that checks the timing costs 0.3 to 2.2 s."""

NUMERICS_SHARE, CLOSING_SHARE = 0.08, 0.05
"""Shares of the budget kept for the numerics, where they can say something, and for the end: letting go of
everything and looking at what was changed (3.5 s after an 8B Llama)."""

DEARER = 1.5
"""Time to build an exploration / time to build the arm that it changes. Rowwise recipes compiled 1.2 to 1.6
times as long as tensorwise in five models on an H200 (torch 2.11)."""

ASKED_OVER = 1.05
"""Budgets within which a finding's own proposal is expected to fit. The rest of the trial is rather
overestimated, and a proposal that is timed alone is worth a few seconds."""

PROFILE_STEPS, PROFILE_S, PROOF_STEPS = 6.0, 0.3, 3.0
"""A profile takes so many steps and seconds at each cut (seen: 3 to 9 steps; warming up, tracing, reading), a
plain proof so many steps of the deepest (1.3 to 4)."""

LATEST = 2.0
"""Budgets after which no round is timed any more, not even one of the least."""

LAST_PROFILE = 2.0
"""Budgets after which only the step as it is is profiled. Without profiles the times stay unexplained, so a
long compilation (60 s for the blocks of a T5) does not cost them."""

BLOCKWISE = "compile-blocks"
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


@dataclass(frozen=True)
class Budget:
    """The seconds of one trial."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())
    """On ``time.monotonic``."""
    numerics: bool = False
    """Whether the numerics can say something, so that time is kept for them."""

    @property
    def end(self) -> float:
        return self.began + self.seconds

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def used_up(self) -> NoNumber:
        """Make the reason for what it leaves no time for."""
        return NoNumber(Reason.NO_TIME_LEFT, f"the budget of {self.seconds:g} s was used up before it")

    @property
    def too_short(self) -> NoNumber:
        """Make the reason for what is not expected to fit into its rest."""
        return NoNumber(
            Reason.NOT_EXPECTED_TO_FIT, f"the budget of {self.seconds:g} s would not have been enough for it"
        )

    def closing_s(self) -> float:
        """Sum up the numerics and the end."""
        return self.seconds * (CLOSING_SHARE + (NUMERICS_SHARE if self.numerics else 0.0))

    def after_window_s(self, costs: Mapping[str, Cost]) -> float:
        """Sum up what follows the window."""
        profiled = compared(costs)
        proven = [cost for name, cost in costs.items() if name not in profiled and name != ArmName.SELF_CHECK]
        return (
            sum(map(profile_s, profiled.values()))
            + sum(PROOF_STEPS * cost.steps_s[-1] for cost in proven)
            + self.closing_s()
        )

    def fits(
        self, cost: Cost, name: str, costs: Mapping[str, Cost], spent_s: float, *, unasked: bool
    ) -> bool:
        """Whether one more arm, beside those that were built, can be built and timed within the budget."""
        every = {**costs, name: cost}
        ends_s = (
            spent_s + cost.build_s + timer.LEAST_ROUNDS * round_s(every.values()) + self.after_window_s(every)
        )
        return ends_s <= self.seconds * (1.0 if unasked else ASKED_OVER)

    def window_until(self, costs: Mapping[str, Cost], explored: Iterable[str]) -> float:
        """Return the clock until which rounds are added to the least ones."""
        return self.end - self.after_window_s(costs) - final_s(costs, explored)

    def final_fits(self, costs: Mapping[str, Cost], explored: Iterable[str], spent_s: float) -> bool:
        """Whether what gained can be put together and timed."""
        return spent_s + final_s(costs, explored) + self.closing_s() <= self.seconds

    def window_latest(self) -> float:
        """Return the clock after which not even the least rounds go on; a late window has some of the budget
        all the same."""
        return max(
            self.began + LATEST * self.seconds, time.monotonic() + (1 - MUST_BEGIN_SHARE) * self.seconds
        )

    def numerics_until(self) -> float:
        return max(self.end, time.monotonic() + NUMERICS_SHARE * self.seconds)


def round_s(costs: Iterable[Cost]) -> float:
    """Sum up one round of the window."""
    return sum(timer.steps_of_a_visit(1e3 * step) * step for cost in costs for step in cost.steps_s)


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
    costs: Mapping[str, Cost], base: str | None, *, name: str, compiles: bool, unasked: bool
) -> Cost | None:
    """Estimate what the arm ``name`` will cost: as much as its ``base``, or as the dearest that compiles when
    it compiles too.

    Compiling blocks costs a part of a base that is compiled as one graph. None when there is nothing to go
    by.
    """
    like = costs.get(base or ArmName.AS_IS) or costs.get(ArmName.AS_IS)
    if like is None:
        return None
    if name == BLOCKWISE and like.compiles:
        return Cost(BLOCKWISE_SHARE * like.build_s, like.steps_s, like.compiles)
    compiles = compiles or like.compiles
    builds = [like.build_s, *(cost.build_s for cost in costs.values() if compiles and cost.compiles)]
    return Cost(max(builds) * (DEARER if unasked else 1.0), like.steps_s, compiles)


def final_s(costs: Mapping[str, Cost], explored: Iterable[str]) -> float:
    """Sum up the window of what gained together, the best of it and the baselines; 0 where fewer than two can
    have gained."""
    tried = [costs[name] for name in explored if name in costs]
    if len(tried) < 2:
        return 0.0
    best = min(tried, key=lambda cost: cost.steps_s[-1])
    baselines = [costs[name] for name in BASELINES if name in costs]
    return (
        max(cost.build_s for cost in tried)
        + timer.LEAST_ROUNDS * round_s([*baselines, best, best])
        + 2 * profile_s(best)
    )
