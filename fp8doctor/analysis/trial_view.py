"""View of a trial: answers that verdict, plan and screens share, computed once."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from fp8doctor.analysis.arms import (
    all_too_large,
    arm,
    best_bf16,
    best_fp8,
    changes_in_bf16,
    fair_bf16,
    left_out_bf16,
    own_bf16_left_out,
    ratio_on_screen,
    savings,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.noise import Pair, contention_that_decides, is_noise, may_become_even
from fp8doctor.analysis.outcome import (
    MeasuredSpeed,
    all_fp8_loses,
    ceiling,
    compared_pairs,
    measured_speed,
)
from fp8doctor.analysis.plan_end import PlanEnd, plan_end
from fp8doctor.analysis.significance import LITTLE
from fp8doctor.analysis.speedup_bound import Ceiling
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, family, that_help_bf16_too
from fp8doctor.facts import Arm, Facts, Trial, if_recorded
from fp8doctor.facts.arm_names import LEFT_OUT_FOR_TIME, ArmName, is_in_bf16, is_withdrawn
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Saving


class TrialView(Struct, frozen=True):
    """The steps of a trial that count, and how they compare.

    A step that was not timed is None, and so is an answer that rests on a fact that was not recorded.
    """

    facts: Facts
    on_gpu: bool
    savings: dict[str, Saving]
    """Treatments that were timed alone on a GPU -> what they save."""
    too_large: dict[tuple[str, ...], Arm]
    """Treatments that take more memory than there is -> the variant of them."""
    as_is: Arm | None
    prescribed: Arm | None
    """The step with the whole plan."""
    bf16: Arm | None
    """The best BF16 of the same model."""
    left_out_bf16: Arm | None
    """The compiled BF16 that the budget left no time for."""
    own_bf16_left_out: Arm | None
    """The same, if the user compiles: what leaves FP8 off then keeps his own form, without a time."""
    fp8: Arm | None
    """The fastest total in FP8."""
    fp8_is_noise: bool
    """True if noise hides the difference between the fastest FP8 and its BF16."""
    achievable: float | None
    """The speedup of the fastest FP8 over its BF16; None for noise."""
    speed: MeasuredSpeed | None
    """The step as it is, compared with the best BF16."""
    most: Ceiling | None
    """The most that FP8 can give on this GPU."""
    end: PlanEnd | None
    """The variant that the plan ends in."""
    all_fp8_loses: bool
    """True if every FP8 variant is slower than BF16 beyond the noise."""
    host_contention: str | None
    """The busy host that the answer depends on, in words."""

    @property
    def uses_fp8(self) -> bool:
        """Return whether any layer is set up for FP8. Raises `Unrecorded` without layers."""
        return uses_fp8(self.facts)

    @property
    def gives_up_fp8(self) -> bool:
        """Return whether the plan takes a job in FP8 to BF16."""
        return self.end is not None and self.end.in_bf16 and self.uses_fp8

    @property
    def size_is_wrong(self) -> bool:
        """Return whether the timing contradicts its own kernel times."""
        return self.speed is not None and self.speed.bound is not None

    @property
    def may_become_even(self) -> bool:
        """Return whether a quiet machine may make the step as it is even with BF16, and no more."""
        both = Pair(self.as_is, self.bf16) if self.as_is and self.bf16 and self.uses_fp8 else None
        return both is not None and bool(if_recorded(may_become_even, both, self.facts.trial))

    @property
    def deciding_fp8(self) -> Arm | None:
        """Return the FP8 step without a time that keeps a plan in BF16 undecided.

        It is the whole plan, the only compiled FP8, or any besides the user's own.
        """
        if not self.gives_up_fp8 or self.has_little_to_gain:
            return None
        every = [
            each
            for each in self.facts.trial.arms
            if each.get("treatments") and not is_in_bf16(each.name) and not is_withdrawn(*each.treatments)
        ]
        timed = {name for each in every if each.tried for name in each.treatments}
        late = [each for each in every if why_of(each) in LEFT_OUT_FOR_TIME]
        whole = (each for each in late if each.name == ArmName.PRESCRIBED and self.prescribed is None)
        compiled = (each for each in late if _compiles(each.treatments) and not _compiles(timed))
        return next(whole, None) or next(compiled, None) or (next(iter(late), None) if not timed else None)

    @property
    def fp8_is_undecided(self) -> bool:
        """Return whether a plan in BF16 rests on FP8 that has no time, or that noise hides."""
        hidden = self.gives_up_fp8 and self.fp8_is_noise and not self.has_little_to_gain
        return self.deciding_fp8 is not None or hidden

    @property
    def open_in_bf16(self) -> frozenset[str]:
        """Name what helps BF16 too and was timed in FP8 alone, though the plan leaves FP8 off."""
        if not self.gives_up_fp8:
            return frozenset()
        timed = [
            each
            for each in self.facts.trial.arms
            if each.tried and not is_withdrawn(each.name, *each.get("treatments", ()))
        ]
        in_bf16 = {name for each in timed if is_in_bf16(each.name) for name in each.get("treatments", ())}
        shared = (changes_in_bf16(each.name, ()) for each in timed)  # of those that name no treatment
        every = that_help_bf16_too(name for each in timed for name in each.get("treatments", ()))
        return every.difference(in_bf16, *shared)

    @property
    def has_little_to_gain(self) -> bool:
        """Return whether FP8 would gain less than what matters if its casts were free."""
        return self.bound is not None and self.bound < LITTLE

    @property
    def bound(self) -> float | None:
        """Return the upper bound for the layers in FP8, or for any if none is; None if unknown."""
        return (self.most.of_the_job or self.most.speedup) if self.most else None


def _compiles(names: Iterable[str]) -> bool:
    return any(family(name) == family(COMPILE_BLOCKS) for name in names)


def trial_view(facts: Facts) -> TrialView:
    """Compute all answers of the trial in ``facts`` once."""
    trial = facts.get("trial", Trial())
    fp8 = if_recorded(best_fp8, facts)
    bf16_of_fp8 = if_recorded(fair_bf16, facts, fp8) if fp8 else None
    shown = if_recorded(ratio_on_screen, bf16_of_fp8, fp8) if fp8 and bf16_of_fp8 else None
    best = shown.median if shown else None
    return TrialView(
        facts=facts,
        on_gpu=timed_on_gpu(facts),
        savings=if_recorded(savings, facts) or {},
        too_large=if_recorded(all_too_large, trial) or {},
        as_is=if_recorded(arm, trial, ArmName.AS_IS),
        prescribed=if_recorded(arm, trial, ArmName.PRESCRIBED),
        bf16=if_recorded(best_bf16, facts),
        left_out_bf16=if_recorded(left_out_bf16, trial),
        own_bf16_left_out=if_recorded(own_bf16_left_out, facts),
        fp8=fp8,
        fp8_is_noise=(hidden := bool(if_recorded(is_noise, bf16_of_fp8, fp8, trial))),
        achievable=None if hidden else best,
        speed=if_recorded(measured_speed, facts),
        end=if_recorded(plan_end, facts),
        all_fp8_loses=bool(if_recorded(all_fp8_loses, facts)),
        host_contention=if_recorded(contention_that_decides, trial, if_recorded(compared_pairs, facts) or ()),
        most=if_recorded(ceiling, facts),
    )
