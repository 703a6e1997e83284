"""View of a trial: answers that verdict, plan and screens share, each computed once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from fp8doctor.analysis.arms import (
    all_too_large,
    arm,
    best_bf16,
    best_fp8,
    changes_in_bf16,
    fair_bf16,
    left_out_bf16,
    own_bf16_left_out,
    savings,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.noise import disturbing_host, is_noise
from fp8doctor.analysis.outcome import all_fp8_loses, ceiling, kernel_bound, measured_speedup
from fp8doctor.analysis.plan_end import PlanEnd, plan_end
from fp8doctor.analysis.significance import EVEN, LITTLE, Interval
from fp8doctor.analysis.speedup_bound import Ceiling
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, family, that_help_bf16_too
from fp8doctor.facts import Arm, Facts, Trial, if_recorded
from fp8doctor.facts.arm_names import (
    LEFT_OUT_FOR_TIME,
    ArmName,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
    keeps_users_compilation,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Saving


class TrialView:
    """The steps of a trial that count, and how they compare.

    A step that was not timed is None, and so is an answer that rests on a fact that was not recorded.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._trial: Trial = facts.get("trial", Trial())

    @cached_property
    def on_gpu(self) -> bool:
        return timed_on_gpu(self.facts)

    @cached_property
    def savings(self) -> dict[str, Saving]:
        """Treatments that were timed alone on a GPU -> what they save."""
        return if_recorded(savings, self.facts) or {}

    @cached_property
    def too_large(self) -> dict[tuple[str, ...], Arm]:
        """Treatments that take more memory than there is -> the variant of them."""
        return if_recorded(all_too_large, self._trial) or {}

    @cached_property
    def as_is(self) -> Arm | None:
        return if_recorded(arm, self._trial, ArmName.AS_IS)

    @cached_property
    def bf16(self) -> Arm | None:
        """The best BF16 of the same model."""
        return if_recorded(best_bf16, self.facts)

    @cached_property
    def left_out_bf16(self) -> Arm | None:
        """The compiled BF16 that the budget left no time for."""
        return if_recorded(left_out_bf16, self._trial)

    @cached_property
    def own_bf16_left_out(self) -> Arm | None:
        """The same, if the user compiles: what leaves FP8 off then keeps his own form, without a time."""
        return if_recorded(own_bf16_left_out, self.facts)

    @cached_property
    def fp8(self) -> Arm | None:
        """The fastest total in FP8."""
        return if_recorded(best_fp8, self.facts)

    @cached_property
    def own_fp8_left_out(self) -> Arm | None:
        """The conversion of a BF16 job under the user's own compilation that had no time.

        None if any was timed in that form, or if another form is faster than BF16 anyway.
        """
        own = [
            each
            for each in self._trial.get("arms", ())
            if is_conversion(name := each.get("name", "")) and keeps_users_compilation(name)
        ]
        wins = self.fp8 and self.bf16 and (self.fp8.step_ms or 0.0) < (self.bf16.step_ms or 0.0)
        in_fp8 = if_recorded(uses_fp8, self.facts)
        if in_fp8 is not False or wins or any(each.tried for each in own):
            return None
        return next((each for each in own if why_of(each) in LEFT_OUT_FOR_TIME), None)

    @cached_property
    def bf16_of_fp8(self) -> Arm | None:
        """The best BF16 with the changes of `fp8` that help it too."""
        return if_recorded(fair_bf16, self.facts, self.fp8) if self.fp8 else None

    @cached_property
    def speedup(self) -> Interval | None:
        """The step as it is in FP8, compared with the best BF16."""
        return if_recorded(measured_speedup, self.facts)

    @cached_property
    def most(self) -> Ceiling | None:
        """The most that FP8 can give on this GPU."""
        return if_recorded(ceiling, self.facts)

    @cached_property
    def end(self) -> PlanEnd | None:
        """The variant that the plan ends in."""
        return if_recorded(plan_end, self.facts)

    @cached_property
    def all_fp8_loses(self) -> bool:
        """Return whether every FP8 variant is slower than BF16 beyond the noise."""
        return bool(if_recorded(all_fp8_loses, self.facts))

    @cached_property
    def host_contention(self) -> str | None:
        """Describe the busy host that the answer depends on."""
        now = (self.bf16, self.as_is) if self.speedup else (None, None)
        for bf16, fp8 in (now, (self.bf16_of_fp8, self.fp8)):
            if bf16 and fp8 and (what := if_recorded(disturbing_host, bf16, fp8, self._trial)):
                return what
        return None

    @cached_property
    def uses_fp8(self) -> bool:
        """Return whether any layer is set up for FP8. Raises `Unrecorded` without layers."""
        return uses_fp8(self.facts)

    @cached_property
    def gives_up_fp8(self) -> bool:
        """Return whether the plan takes a job in FP8 to BF16."""
        return self.end is not None and self.end.in_bf16 and self.uses_fp8

    @cached_property
    def allowed(self) -> float | None:
        """Bound FP8 by its kernel times, if its timing is above that: then its size is wrong."""
        most = if_recorded(kernel_bound, self.facts) if self.speedup else None
        if most is None or self.speedup is None or most.basis != "measured":
            return None
        above = self.speedup.median > most.speedup * (1 + EVEN)
        return most.speedup if above and not is_noise(self.bf16, self.as_is, self._trial) else None

    @cached_property
    def deciding_fp8(self) -> Arm | None:
        """Return the FP8 step without a time that keeps a plan in BF16 undecided.

        It is the whole plan, the only compiled FP8, or any besides the user's own.
        """
        if not self.gives_up_fp8 or self.has_little_to_gain:
            return None
        every = [
            each
            for each in self._trial.arms
            if each.get("treatments") and not is_in_bf16(each.name) and not is_withdrawn(*each.treatments)
        ]
        timed = {name for each in every if each.tried for name in each.treatments}
        late = [each for each in every if why_of(each) in LEFT_OUT_FOR_TIME]
        prescribed = arm(self._trial, ArmName.PRESCRIBED)
        whole = (each for each in late if each.name == ArmName.PRESCRIBED and prescribed is None)
        compiled = (each for each in late if _compiles(each.treatments) and not _compiles(timed))
        return next(whole, None) or next(compiled, None) or (next(iter(late), None) if not timed else None)

    @cached_property
    def fp8_is_undecided(self) -> bool:
        """Return whether a plan in BF16 rests on FP8 that has no time, or that noise hides."""
        noise = bool(if_recorded(is_noise, self.bf16_of_fp8, self.fp8, self._trial))
        hidden = self.gives_up_fp8 and noise and not self.has_little_to_gain
        return self.deciding_fp8 is not None or hidden

    @cached_property
    def open_in_bf16(self) -> frozenset[str]:
        """Name what helps BF16 too and was timed in FP8 alone, though the plan leaves FP8 off."""
        if not self.gives_up_fp8:
            return frozenset()
        timed = [
            each
            for each in self._trial.arms
            if each.tried and not is_withdrawn(each.name, *each.get("treatments", ()))
        ]
        in_bf16 = {name for each in timed if is_in_bf16(each.name) for name in each.get("treatments", ())}
        shared = (changes_in_bf16(each.name, ()) for each in timed)  # of those that name no treatment
        every = that_help_bf16_too(name for each in timed for name in each.get("treatments", ()))
        return every.difference(in_bf16, *shared)

    @cached_property
    def has_little_to_gain(self) -> bool:
        """Return whether FP8 would gain less than what matters if its casts were free."""
        return self.bound is not None and self.bound < LITTLE

    @cached_property
    def bound(self) -> float | None:
        """Return the upper bound for the layers in FP8, or for any if none is; None if unknown."""
        return (self.most.of_the_job or self.most.speedup) if self.most else None


def _compiles(names: Iterable[str]) -> bool:
    return any(family(name) == family(COMPILE_BLOCKS) for name in names)
