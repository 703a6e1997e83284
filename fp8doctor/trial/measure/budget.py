"""Budget a trial: what is begun, when a build is given up, and what is kept for the rest.

Variants come in the order of their importance. One that the report needs is begun up to the hard deadline;
every other has to fit into the budget, if it builds as long as the slowest of its kind. Both leave time for
the least rounds of all variants and for what follows them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.variant import VariantPlan

HARD_LIMIT = 1.25
"""Budgets within which the whole command ends: a build that takes longer is given up, and the parent process
ends a child that overstays. The project's bound."""

LEAST_SHARE = 0.5
"""Share of the budget that the trial has however long the import and the load took. A choice: a model that
loads for minutes is timed too."""

REPORT_S, CLOSING_S, ENDING_SHARE = 4.0, 1.2, 0.12
"""Seconds kept for the report, seconds kept before it to let go of the GPU, and the share of a small budget
that both are at most. A process that lets go of a GPU has 2 s (`fp8doctor.worker.parent.GRACE_S`)."""

ROUNDS_SHARE = 0.2
"""Share of the budget for rounds that nothing depends on. With 15 rounds instead of 6 a Llama 3B was
predicted no better (0.3 to 1.5% off, and 1.0 to 1.7), and took 16 s longer (H200, torch 2.11)."""

UNKNOWN_BUILD_S = 10.0
"""Build of a variant that compiles if none of its kind was built: 4 to 13 s by block (H200, torch 2.11)."""

LEAST_WARM_UP = 3
"""Least steps of a variant before it is timed."""

PROFILE_STEPS, PROFILE_S, SHOWN_STEPS = 6.0, 0.3, 4.0
"""Steps and seconds of a profile at each depth (seen: 3 to 9 steps, with warm-up and reading), and steps at
every depth that a variant's profile or proof takes in the mean."""


@dataclass(frozen=True)
class Budget:
    """The seconds of one command, or of one trial in a user's process."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())
    """On ``time.monotonic``, as all clocks here."""
    uncounted_s: float = 0.0
    """Seconds of the load before that, which do not count."""
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

    @property
    def ending_s(self) -> float:
        """The seconds from the last proof to the end of the command."""
        return self._at_most(CLOSING_S + REPORT_S) + self.noted_s

    def _at_most(self, seconds: float) -> float:
        """Take less of a small budget for the end."""
        return seconds * min(1.0, ENDING_SHARE * self.seconds / (CLOSING_S + REPORT_S))

    def after_rounds_s(self, attempts: Iterable[Attempt]) -> float:
        """Sum up what follows the rounds: profiles, proofs, and the end."""
        return SHOWN_STEPS * sum(sum(_steps_s(each)) for each in attempts) + self.ending_s

    def after_builds_s(self, attempts: Sequence[Attempt]) -> float:
        """Sum up the least rounds and what follows them."""
        return timer.LEAST_ROUNDS * sum(map(_round_s, attempts)) + self.after_rounds_s(attempts)

    def build_until(self, attempts: Sequence[Attempt]) -> float:
        """Return the clock at which the next build is given up, to time all others.

        While no step is known, half of the time beyond the budget is kept for that.
        """
        if not (built := _with_one_more(attempts)):
            return (self.end + self.last) / 2 - self.ending_s
        return self.last - self.after_builds_s(built)

    def rounds_until(self, attempts: Sequence[Attempt]) -> float:
        """Return the clock until which rounds are added to the least ones."""
        return self.end - self.after_rounds_s(attempts)

    def rounds_soon(self) -> float:
        """Return the clock until which rounds are added that nothing depends on."""
        return time.monotonic() + ROUNDS_SHARE * self.seconds

    def rounds_latest(self, attempts: Sequence[Attempt]) -> float:
        """Return the clock at which even the least rounds end, to keep time for proofs."""
        return self.last - self.after_rounds_s(attempts)

    def profile_fits(self, attempt: Attempt) -> bool:
        """Return whether a variant can be profiled at every depth before the end."""
        profile_s = sum(PROFILE_S + PROFILE_STEPS * step for step in _steps_s(attempt))
        return time.monotonic() + profile_s <= self.last - self.ending_s

    def no_time_for(self, plan: VariantPlan, attempts: Sequence[Attempt]) -> NoNumber | None:
        """Explain why a variant is not begun; None if it is."""
        built, now, needed = _with_one_more(attempts), time.monotonic(), is_needed(plan, attempts)
        if now >= (self.build_until(attempts) if needed else self.end):
            return self.used_up
        first_bf16 = plan.name in BF16_BASELINES and not any(
            each.plan.name in BF16_BASELINES for each in built
        )
        if first_bf16 or not built:
            return None
        fits = now + build_s(plan, attempts) + self.after_builds_s(built) <= (
            self.last if needed else self.end
        )
        return None if fits else self.too_short

    def enough_s(self, attempts: Sequence[Attempt]) -> float | None:
        """Return the budget, in tens of seconds, for the variants that were left out for time.

        For those that decide, if there are any, else for all; None if none was left out. A build may take
        twice as long as its like: the compiler's caches may hold nothing of it. What a build took that was
        given up is in the elapsed seconds, and comes once more.
        """
        left = [each for each in attempts if each.why in LEFT_OUT_FOR_TIME]
        left = [each for each in left if is_needed(each.plan, attempts)] or left
        built = [each for each in attempts if each.ready]
        if not left or not built:
            return None
        builds_s = sum(max(2 * build_s(each.plan, built), each.build_s) for each in left)
        all_s = self.elapsed_s + builds_s + self.after_builds_s([*built, *built[:1] * len(left)])
        return 10.0 * math.ceil((all_s - self.ending_s + CLOSING_S + REPORT_S + self.noted_s) / 10.0)


def build_s(plan: VariantPlan, attempts: Sequence[Attempt]) -> float:
    """Estimate the seconds of a build: of the slowest of its kind that compiled, or of some eager steps."""
    built = [each for each in attempts if each.ready]
    base = next((each for each in built if each.plan.name == plan.base), None)
    if not (plan.compiled or (base is not None and _compiled(base))):
        return (LEAST_WARM_UP + 1) * min((sum(_steps_s(each)) for each in built), default=0.0)
    alike = [each.build_s for each in built if _compiled(each) and each.plan.by_block == plan.by_block]
    return max(alike, default=UNKNOWN_BUILD_S)


def is_needed(plan: VariantPlan, attempts: Sequence[Attempt]) -> bool:
    """Return whether a report cannot do without the variant.

    That is the step as it is, every BF16 and the whole plan, or the first conversion of a model without FP8.
    """
    if is_conversion(plan.name):
        return not any(each.ready and is_conversion(each.plan.name) for each in attempts)
    decides = plan.name in (ArmName.AS_IS, ArmName.PRESCRIBED) or is_in_bf16(plan.name)
    return decides and not plan.explored


def compared(times: Mapping[str, float], in_fp8: Sequence[str]) -> list[str]:
    """Name the step as it is, the fastest BF16, and the fastest other FP8, which are profiled."""
    others = (ArmName.AS_IS, ArmName.SELF_CHECK, ArmName.WITHOUT_ADAPTERS)
    fp8 = [name for name in in_fp8 if name not in others]
    groups = ([name for name in group if name in times] for group in ([ArmName.AS_IS], BF16_BASELINES, fp8))
    return [min(group, key=times.__getitem__) for group in groups if group]


def _with_one_more(attempts: Sequence[Attempt]) -> list[Attempt]:
    """List what was built, and the first once more in place of what is built next."""
    built = [each for each in attempts if each.ready]
    return [*built, *built[:1]]


def _steps_s(attempt: Attempt) -> list[float]:
    return [ready.step_s for ready in attempt.ready]


def _round_s(attempt: Attempt) -> float:
    steps = _steps_s(attempt)
    blocks = timer.blocks([1e3 * step for step in steps])
    return sum(block.steps * step for step, block in zip(steps, blocks, strict=True))


def _compiled(attempt: Attempt) -> bool:
    counted = (ready.compiled.graphs for ready in attempt.ready)
    return any(graphs is not NOT_RECORDED and graphs > 0 for graphs in counted)
