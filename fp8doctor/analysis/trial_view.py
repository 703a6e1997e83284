"""The table of a trial: each form of the training step with its time, the best of them, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from msgspec import Struct

from fp8doctor.analysis.arms import (
    all_changes,
    arm_if_any,
    base_of,
    changes_in_bf16,
    is_finite,
    is_total,
    labels,
    lacked_time,
    measured_saving,
    ratio,
    timed_on_gpu,
    uses_fp8,
)
from fp8doctor.analysis.compile_coverage import own_compile
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, speed
from fp8doctor.analysis.significance import LITTLE, Number, holding, interval
from fp8doctor.analysis.step_difference import breakdown_of, part_ms
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, family, that_help_bf16_too, traits
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    ArmName,
    Reason,
    is_conversion,
    is_in_bf16,
    keeps_users_compilation,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Saving

T = TypeVar("T")


class Variant(Struct, frozen=True):
    """One form of the training step."""

    name: str
    """As the JSON names it: ``as_is``, ``bf16_compiled``, ``planned``."""
    words: str
    in_fp8: bool
    ms: Number
    rounds: int = 0
    """How often it was timed; 0 for an estimate."""
    changes: tuple[str, ...] = ()
    """Treatments that make it of the step as it is, besides leaving FP8 off, converting and compiling."""
    arm: Arm = Arm()
    """As the trial timed it; empty for an estimate."""

    @property
    def is_as_is(self) -> bool:
        return self.name == ArmName.AS_IS


def known(method: Callable[[TrialView], T | None]) -> cached_property[T | None]:
    """Compute an answer once. It is None if it rests on a fact that was not recorded."""
    return cached_property(lambda view: if_recorded(method, view))


def _ms(timed: Arm) -> float:
    return timed.step_ms or 0.0


class TrialView:
    """The steps of a trial that count, and how they compare.

    A step that was not timed is None, and so is an answer that rests on a fact that was not recorded.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.trial: Trial = facts.get("trial", Trial())

    @cached_property
    def on_gpu(self) -> bool:
        return timed_on_gpu(self.facts)

    @cached_property
    def uses_fp8(self) -> bool:
        """Return whether any layer is set up for FP8. Raises `Unrecorded` without layers."""
        return uses_fp8(self.facts)

    @cached_property
    def words(self) -> dict[str, str]:
        """Variant -> what a user calls it."""
        return labels(self.facts)

    @known
    def table(self) -> list[Variant] | None:
        """The variants that a GPU timed and a user could run: the step as it is, the best BF16, changes."""
        in_fp8, found = self.uses_fp8, []
        for each in self.facts.arms() if self.on_gpu else ():
            if not each.tried or not each.step_ms:
                continue
            converted = is_conversion(each.name)
            is_changed = converted or is_total(each)
            changes = self.changes_of(each) if is_changed else sorted(changes_in_bf16(each))
            if not (is_changed or changes or each.name == ArmName.AS_IS or each is self.bf16):
                continue
            name, rounds = each.name, interval(each.rounds_ms)
            ms = holding(each.step_ms, rounds.low, rounds.high)
            of_fp8 = converted or (in_fp8 and not is_in_bf16(name))
            found.append(
                Variant(name, self.words[name], of_fp8, ms, len(each.rounds_ms), tuple(changes), each)
            )
        return found

    @cached_property
    def in_fp8(self) -> list[Variant]:
        """The variants of the table in FP8."""
        return [each for each in self.table or [] if each.in_fp8]

    def changes_of(self, of: Arm) -> list[str]:
        """List what turns the step as it is into a variant; blocks that the user compiles stay compiled."""
        compiled = is_conversion(of.name) and own_compile(self.facts) == "blocks"
        changes = all_changes(self.trial, of)
        return [name for name in changes if not (compiled and traits(name).compiles)]

    def of(self, name: str) -> Arm | None:
        """Return the variant of that name, if it was timed."""
        return arm_if_any(self.facts, name)

    @known
    def as_is(self) -> Arm | None:
        return self.of(ArmName.AS_IS)

    @known
    def bf16(self) -> Arm | None:
        """The best BF16 of the same model. Without FP8, also outside of layers, the job as it is counts."""
        names = BF16_BASELINES if self.uses_fp8 or self.facts.get("network.fp8_calls") else BASELINES
        return min(filter(None, (self.of(name) for name in names)), key=_ms, default=None)

    @known
    def totals(self) -> list[Arm] | None:
        """The timed steps in FP8: as it is, then changed; of a job without FP8 its conversions."""
        return [each.arm for each in self.in_fp8]

    @known
    def fp8(self) -> Arm | None:
        """The fastest in FP8, of those that train without NaN if BF16 does."""
        totals = self.totals or []
        if self.bf16 is None or is_finite(self.bf16):
            totals = list(filter(is_finite, totals))
        return min(totals, key=_ms, default=None)

    def fair_bf16(self, fp8: Arm | None) -> Arm | None:
        """Find the best BF16 with those changes of an FP8 step that help it too; None if it was not timed.

        If it is slower or does not fit, the best BF16 without them.
        """
        best = self.bf16
        if fp8 is None or best is None:
            return None
        shared = that_help_bf16_too(all_changes(self.trial, fp8) if self.uses_fp8 else ())
        shared -= {*best.get("treatments", ())}  # an autocast that every BF16 has
        alike = (each for each in self.trial.arms if is_in_bf16(each.name))
        same = (each for each in alike if changes_in_bf16(each) == shared)
        planned = next(same, None) if shared else best
        if planned is None or planned.tried:
            return min(planned, best, key=_ms) if planned else None
        return best if why_of(planned) is Reason.DOES_NOT_FIT else None

    @known
    def end(self) -> Variant | None:
        """The variant that the plan ends in: the fewest changes within 2% of the fastest.

        Another precision is a change. In doubt the user's own step stays. Noise ties two of one precision.
        What is not finite does not count, unless BF16 is not either. None if the step as it is, or every
        BF16, has no time.
        """
        table = self.table or []
        now = next((each for each in table if each.is_as_is), None)
        if now is None or all(each.in_fp8 for each in table):
            return None
        if any(is_finite(each.arm) for each in table if not each.in_fp8):
            table = [each for each in table if is_finite(each.arm)]
        fastest = min(table, key=lambda each: each.ms.value)

        def is_as_fast(each: Variant) -> bool:
            slower = ratio(each.arm, fastest.arm)
            tied = each.in_fp8 == fastest.in_fp8 and slower.low <= 1
            return tied or slower.value <= 1 + SELF_CHECK_TOLERANCE

        def place(each: Variant) -> tuple[object, ...]:
            other = each.in_fp8 != self.uses_fp8
            return not each.is_as_is, len(each.changes) + other, other, each.ms.value

        best = min(filter(is_as_fast, table), key=place)
        if best is now or now not in table:
            return best
        faster = speed(best.arm, now.arm, self.trial)
        return now if faster.side == "open" or faster.low <= 1 else best

    @cached_property
    def gives_up_fp8(self) -> bool:
        """Return whether the plan takes a job in FP8 to BF16."""
        return self.end is not None and not self.end.in_fp8 and self.uses_fp8

    @known
    def bf16_of_the_plan(self) -> Arm | None:
        """The form of the BF16 that the plan ends in, without its changes; else the fastest."""
        if self.end is None or self.end.in_fp8:
            return self.bf16 if self.on_gpu else None
        return self.form_of(self.end.arm) or self.end.arm

    def form_of(self, of: Arm) -> Arm | None:
        """Find the baseline that a BF16 variant changes, or changes a change of."""
        below: Arm | None = of
        while below is not None and below.name not in BASELINES:
            below = self.of(below.get("base") or "")
        return below

    @known
    def speedup(self) -> Number | None:
        """The step as it is in FP8, compared with the best BF16.

        One that was left out for time may be faster: then FP8 is known to be slower, or nothing is.
        """
        if not self.on_gpu or not self.uses_fp8 or not self.as_is or not self.bf16:
            return None
        found = speed(self.as_is, self.bf16, self.trial)
        return None if self.left_out_bf16 and found.high >= 1 else found

    @known
    def bound(self) -> float | None:
        """The most that FP8 can give over the best BF16: its matmuls as fast as profiled, all else free.

        Without FP8 that was profiled they take half their time, as FP8's rate is twice that of BF16. Never
        below a speedup that timing proves. None if the BF16 was not profiled.
        """
        bf16, totals = self.bf16, sorted(self.totals or [], key=_ms)
        profile = if_recorded(breakdown_of, bf16) if bf16 and self.on_gpu else None
        if bf16 is None or not profile:
            return None
        same_job = (each for each in totals if self.fair_bf16(each) is bf16)
        parts = filter(None, (if_recorded(breakdown_of, each) for each in same_job))
        fp8 = next((each for each in parts if each.families_ms.get("gemm_fp8")), None)
        gemms_ms = part_ms(profile, "GEMMs")
        least_ms = min(part_ms(fp8, "GEMMs"), gemms_ms) if fp8 else gemms_ms / 2
        proven = (ratio(fair, each).low for each in totals if (fair := self.fair_bf16(each)))
        return max([_ms(bf16) / (_ms(bf16) - gemms_ms + least_ms), *proven])

    @cached_property
    def has_little_to_gain(self) -> bool:
        """Return whether FP8 would gain less than what matters if its casts were free."""
        return self.bound is not None and self.bound < LITTLE

    @cached_property
    def savings(self) -> dict[str, Saving]:
        """Treatments that were timed alone on a GPU -> what they save."""
        found: dict[str, Saving] = {}
        for alone in self.facts.arms() if self.on_gpu else ():
            if not alone.tried or len(alone.get("treatments", ())) != 1 or is_in_bf16(alone.name):
                continue
            if base := base_of(self.trial, alone):
                found.setdefault(alone.treatments[0], measured_saving(self.trial, base, alone))
        return found

    @cached_property
    def too_large(self) -> dict[tuple[str, ...], Arm]:
        """Treatments that take more memory than there is -> the first variant of them."""
        arms = (each for each in reversed(self.facts.arms()) if recorded(each, "treatments"))
        return {
            each.treatments: each
            for each in arms
            if not each.get("tried", True) and why_of(each) is Reason.DOES_NOT_FIT
        }

    @cached_property
    def late(self) -> dict[str, Arm]:
        """The variants that only time kept from being timed, by their names."""
        return {each.name: each for each in self.facts.arms() if recorded(each, "name") and lacked_time(each)}

    @known
    def late_first(self) -> Arm | None:
        """The first variant that had no time although it comes before all fixes and other recipes."""
        conversions = [each.name for each in self.trial.arms if is_conversion(each.name)]
        names = (ArmName.BF16_AS_COMPILED, ArmName.PRESCRIBED, *conversions[:1], ArmName.BF16_COMPILED)
        return next((self.late[name] for name in names if name in self.late), None)

    @known
    def left_out_bf16(self) -> Arm | None:
        """The compiled BF16 that had no time and may be the fastest.

        That is BF16 as the user compiles; or block by block, if no compiled BF16 was timed.
        """
        timed = any(self.of(name) for name in (ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED))
        own = self.late.get(ArmName.BF16_AS_COMPILED)
        return own or (None if timed else self.late.get(ArmName.BF16_COMPILED))

    @known
    def own_bf16_left_out(self) -> Arm | None:
        """The same, if the user compiles: what leaves FP8 off then keeps his own form, without a time."""
        late = self.left_out_bf16
        compiles = any(linear.get("compiled") is not None for linear in self.facts.linears())
        own = late and (compiles or late.name == ArmName.BF16_AS_COMPILED)
        return late if own and self.uses_fp8 else None

    @cached_property
    def own_fp8_left_out(self) -> Arm | None:
        """The FP8 in a BF16 job's own compiled form, if only time kept every such form from being timed.

        None if another form is faster than BF16 anyway.
        """
        wins = self.fp8 and self.bf16 and _ms(self.fp8) < _ms(self.bf16)
        if wins or any(_is_own_conversion(each.name) for each in self.totals or []):
            return None
        return next((each for name, each in self.late.items() if _is_own_conversion(name)), None)

    @cached_property
    def deciding_fp8(self) -> Arm | None:
        """The FP8 that a plan in BF16 waits for, and that the budget left no time for."""
        if not self.gives_up_fp8 or self.has_little_to_gain:
            return None
        timed = [each for each in self.totals or [] if each is not self.as_is]
        late = list(filter(is_total, self.late.values()))
        planned = [each for each in late if each.name == ArmName.PRESCRIBED]
        compiled = [] if any(map(_compiles, timed)) else list(filter(_compiles, late))
        return next(iter(planned or compiled or ([] if timed else late)), None)

    @cached_property
    def fp8_is_undecided(self) -> bool:
        """Return whether a plan in BF16 rests on FP8 that has no time, or that noise hides."""
        bf16 = self.fair_bf16(self.fp8)
        noise = bf16 and self.fp8 and speed(self.fp8, bf16, self.trial).side == "open"
        hidden = noise and self.gives_up_fp8 and not self.has_little_to_gain
        return bool(self.deciding_fp8 or hidden)


def _is_own_conversion(name: str) -> bool:
    return is_conversion(name) and keeps_users_compilation(name)


def _compiles(of: Arm) -> bool:
    return any(family(name) == family(COMPILE_BLOCKS) for name in of.treatments)


def is_faster(facts: Facts) -> bool:
    """Return whether FP8 as it runs was timed as faster than BF16 for sure."""
    found = TrialView(facts).speedup
    return found is not None and found.side == "faster"


def fp8_pays(facts: Facts) -> bool:
    """Return whether a GPU timed a whole FP8 step that is not clearly slower."""
    view = TrialView(facts)
    pairs = ((each.arm, view.fair_bf16(each.arm)) for each in view.in_fp8)
    return any(bf16 and speed(of, bf16, facts.trial).side != "slower" for of, bf16 in pairs)
