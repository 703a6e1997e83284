"""View of a trial: answers that verdict, plan and screens share, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from fp8doctor.analysis.arms import (
    all_too_large,
    arm,
    best_bf16,
    best_fp8,
    fair_bf16,
    fp8_totals,
    lacked_time,
    left_out_bf16,
    own_bf16_left_out,
    ratio,
    savings,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.noise import speed
from fp8doctor.analysis.significance import EVEN, LITTLE, Number
from fp8doctor.analysis.step_difference import breakdown_of, part_ms
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, family
from fp8doctor.analysis.variants import Variant, best_of, timed_variants
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    ArmName,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
    keeps_users_compilation,
)
from fp8doctor.finding import Saving

T = TypeVar("T")


def known(method: Callable[[TrialView], T | None]) -> cached_property[T | None]:
    """Compute an answer once. It is None if it rests on a fact that was not recorded."""
    return cached_property(lambda view: if_recorded(method, view))


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
    def uses_fp8(self) -> bool:
        """Return whether any layer is set up for FP8. Raises `Unrecorded` without layers."""
        return uses_fp8(self.facts)

    @cached_property
    def table(self) -> list[Variant]:
        return if_recorded(timed_variants, self.facts) or []

    @known
    def as_is(self) -> Arm | None:
        return arm(self._trial, ArmName.AS_IS)

    @known
    def bf16(self) -> Arm | None:
        """The best BF16 of the same model."""
        return best_bf16(self.facts)

    @known
    def fp8(self) -> Arm | None:
        """The fastest total in FP8."""
        return best_fp8(self.facts)

    @known
    def end(self) -> Variant | None:
        """The variant that the plan ends in."""
        return best_of(self.table, self.uses_fp8, self._trial) if self.table else None

    @cached_property
    def gives_up_fp8(self) -> bool:
        """Return whether the plan takes a job in FP8 to BF16."""
        return self.end is not None and not self.end.in_fp8 and self.uses_fp8

    def fair_bf16(self, fp8: Arm | None) -> Arm | None:
        """Find the best BF16 with the changes of an FP8 step that help it too."""
        return if_recorded(fair_bf16, self.facts, fp8) if fp8 else None

    @known
    def speedup(self) -> Number | None:
        """The step as it is in FP8, compared with the best BF16.

        One that was left out for time may be faster: then FP8 is known to be slower, or nothing is.
        """
        if not self.on_gpu or not self.uses_fp8 or not self.as_is or not self.bf16:
            return None
        found = speed(self.as_is, self.bf16, self._trial)
        return None if self.left_out_bf16 and found.high >= 1 else found

    @known
    def bound(self) -> float | None:
        """The most that FP8 can give over the best BF16: its matmuls as fast as profiled, all else free.

        Without FP8 that was profiled they take half their time, as FP8's rate is twice that of BF16. Never
        below a speedup that timing proves. None if the BF16 was not profiled.
        """
        if self.kernel_bound is None:
            return None
        totals = if_recorded(fp8_totals, self.facts) or []
        proven = (ratio(bf16, each).low for each in totals if (bf16 := self.fair_bf16(each)))
        return max(self.kernel_bound[0], *proven, 0.0)

    @known
    def kernel_bound(self) -> tuple[float, bool] | None:
        """The same by kernel times alone, and whether FP8's were profiled."""
        bf16 = self.bf16
        profile = if_recorded(breakdown_of, bf16) if bf16 and self.on_gpu else None
        if bf16 is None or not profile or not bf16.step_ms:
            return None
        totals = [each for each in if_recorded(fp8_totals, self.facts) or [] if self.fair_bf16(each) is bf16]
        totals.sort(key=lambda each: each.step_ms or 0.0)
        parts = filter(None, (if_recorded(breakdown_of, each) for each in totals))
        fp8 = next((each for each in parts if each.families_ms.get("gemm_fp8")), None)
        gemms_ms = part_ms(profile, "GEMMs")
        least_ms = min(part_ms(fp8, "GEMMs"), gemms_ms) if fp8 else gemms_ms / 2
        return bf16.step_ms / (bf16.step_ms - gemms_ms + least_ms), fp8 is not None

    @known
    def allowed(self) -> float | None:
        """Bound FP8 by its kernel times, if its timing is above that: then its size is wrong."""
        bound, is_measured = self.kernel_bound or (0.0, False)
        found = self.speedup
        if not is_measured or found is None or found.side == "open":
            return None
        return bound if found.value > bound * (1 + EVEN) else None

    @cached_property
    def has_little_to_gain(self) -> bool:
        """Return whether FP8 would gain less than what matters if its casts were free."""
        return self.bound is not None and self.bound < LITTLE

    @cached_property
    def savings(self) -> dict[str, Saving]:
        """Treatments that were timed alone on a GPU -> what they save."""
        return if_recorded(savings, self.facts) or {}

    @cached_property
    def too_large(self) -> dict[tuple[str, ...], Arm]:
        """Treatments that take more memory than there is -> the variant of them."""
        return if_recorded(all_too_large, self._trial) or {}

    @known
    def left_out_bf16(self) -> Arm | None:
        """The compiled BF16 that the budget left no time for."""
        return left_out_bf16(self._trial)

    @known
    def own_bf16_left_out(self) -> Arm | None:
        """The same, if the user compiles: what leaves FP8 off then keeps his own form, without a time."""
        return own_bf16_left_out(self.facts)

    @cached_property
    def own_fp8_left_out(self) -> bool:
        """Return whether only time kept FP8 from being timed in a BF16 job's own compiled form.

        False if another form is faster than BF16 anyway.
        """
        wins = self.fp8 and self.bf16 and (self.fp8.step_ms or 0.0) < (self.bf16.step_ms or 0.0)
        own = [
            each
            for each in self._trial.get("arms", ())
            if is_conversion(each.get("name", "")) and keeps_users_compilation(each.name)
        ]
        return not wins and not any(each.tried for each in own) and any(map(lacked_time, own))

    @cached_property
    def deciding_fp8(self) -> bool:
        """Return whether a plan in BF16 waits for an FP8 that the budget left no time for."""
        if not self.gives_up_fp8 or self.has_little_to_gain:
            return False
        every = [
            each
            for each in self._trial.arms
            if each.get("treatments") and not is_in_bf16(each.name) and not is_withdrawn(*each.treatments)
        ]
        timed = {name for each in every if each.tried for name in each.treatments}
        late = {name for each in every if lacked_time(each) for name in each.treatments}
        compiles = [{family(name) for name in names} & {family(COMPILE_BLOCKS)} for names in (timed, late)]
        whole = any(each.name == ArmName.PRESCRIBED and lacked_time(each) for each in every)
        return bool(whole or (compiles[1] and not compiles[0]) or (late and not timed))

    @cached_property
    def fp8_is_undecided(self) -> bool:
        """Return whether a plan in BF16 rests on FP8 that has no time, or that noise hides."""
        if self.deciding_fp8:
            return True
        bf16 = self.fair_bf16(self.fp8)
        noise = bf16 and self.fp8 and speed(self.fp8, bf16, self._trial).side == "open"
        return bool(self.gives_up_fp8 and noise and not self.has_little_to_gain)


def is_faster(facts: Facts) -> bool:
    """Return whether FP8 as it runs was timed as faster than BF16 for sure."""
    found = TrialView(facts).speedup if recorded(facts, "network") else None
    return found is not None and found.side == "faster"


def fp8_pays(facts: Facts) -> bool:
    """Return whether a GPU timed a whole FP8 step that is not clearly slower."""
    view = TrialView(facts)
    totals = if_recorded(fp8_totals, facts) or [] if view.on_gpu else []
    pairs = ((each, view.fair_bf16(each)) for each in totals)
    return any(bf16 and speed(each, bf16, facts.trial).side != "slower" for each, bf16 in pairs)
