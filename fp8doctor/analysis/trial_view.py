"""The table of a trial: each form of the training step with its time, the best of them, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from fp8doctor.analysis import noise
from fp8doctor.analysis.arms import (
    Variant,
    all_changes,
    changes_in_bf16,
    labels,
    lacked_time,
    ratio,
    timed_on_cpu,
    uses_fp8,
)
from fp8doctor.analysis.compile_coverage import own_compile
from fp8doctor.analysis.own_step import compiles_any, watched
from fp8doctor.analysis.significance import EVEN, LITTLE, Number, holding, interval
from fp8doctor.analysis.step_difference import breakdown_of, part_ms
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, family, that_help_bf16_too, traits, variant
from fp8doctor.facts import Arm, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    ArmName,
    Reason,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
    keeps_users_compilation,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Saving
from fp8doctor.recipes import FASTEST, low_precision

T = TypeVar("T")

RECIPES_APART = 1.1
"""Most that another recipe may gain: 8% was seen (H200), and never where tensorwise beat BF16."""


def known(method: Callable[[TrialView], T | None]) -> cached_property[T | None]:
    """Compute an answer once. It is None if it rests on a fact that was not recorded."""
    return cached_property(lambda view: if_recorded(method, view))


def _ms(of: Variant) -> float:
    return of.ms.value


class TrialView:
    """The steps of a trial that count, and how they compare.

    A step that was not timed is None, and so is an answer that rests on a fact that was not recorded.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.trial: Trial = facts.get("trial", Trial())

    @cached_property
    def on_gpu(self) -> bool:
        return recorded(self.facts, "trial") and not timed_on_cpu(self.facts)

    @cached_property
    def uses_fp8(self) -> bool:
        """Return whether any layer is set up for FP8. Raises `Unrecorded` without layers."""
        return uses_fp8(self.facts)

    @cached_property
    def words(self) -> dict[str, str]:
        """Variant -> what a user calls it."""
        return labels(self.facts)

    @cached_property
    def timed(self) -> dict[str, Variant]:
        """Every variant that was timed, on whatever device, by its name."""
        in_fp8, found = bool(if_recorded(uses_fp8, self.facts)), dict[str, Variant]()
        for each in self.facts.arms():
            known = recorded(each, "name") and recorded(each, "rounds_ms")
            if known and each.get("tried") and (step_ms := each.get("step_ms")):
                name, rounds = each.name, interval(each.rounds_ms)
                ms = holding(step_ms, rounds.low, rounds.high)
                of_fp8 = is_conversion(name) or (in_fp8 and not is_in_bf16(name))
                found[name] = Variant(name, self.words[name], of_fp8, ms, self.changes_of(each), each)
        return found

    def changes_of(self, of: Arm) -> tuple[str, ...]:
        """List what turns the step as it is into a variant; blocks that the user compiles stay compiled."""
        if is_in_bf16(of.name):
            return tuple(sorted(changes_in_bf16(of)))
        compiled = is_conversion(of.name) and own_compile(self.facts) == "blocks"
        changes = all_changes(self.trial, of)
        return tuple(name for name in changes if not (compiled and traits(name).compiles))

    @cached_property
    def table(self) -> list[Variant]:
        """The variants that a GPU timed and a user could run."""
        return [each for each in self.timed.values() if self.on_gpu and self.is_of_use(each.arm)]

    def is_of_use(self, of: Arm) -> bool:
        """Return whether a user could run it: no replica, and nothing of older reports that was withdrawn."""
        is_job = of.name in BASELINES or is_conversion(of.name) or bool(self.changes_of(of))
        return is_job and not is_withdrawn(of.name, *of.get("treatments", ()))

    @cached_property
    def in_fp8(self) -> list[Variant]:
        """The variants of the table in FP8."""
        return [each for each in self.table if each.in_fp8]

    @property
    def as_is(self) -> Variant | None:
        return self.timed.get(ArmName.AS_IS)

    @cached_property
    def watched(self) -> Variant | None:
        """The step of a watched script, if a GPU ran it."""
        step = watched(self.facts) if self.facts.get("observed.clock") == "cuda" else None
        if step is None:
            return None
        in_fp8, low = bool(if_recorded(uses_fp8, self.facts)), low_precision(self.facts.linears())
        words, ms = variant(step.name, in_fp8, low=low), interval(step.rounds_ms)
        return Variant(step.name, words, in_fp8, ms, arm=step)

    @known
    def bf16(self) -> Variant | None:
        """The best BF16 of the same model. Without FP8, also outside of layers, the job as it is counts."""
        names = BF16_BASELINES if self.uses_fp8 or self.facts.get("network.fp8_calls") else BASELINES
        found = [self.timed[name] for name in names if name in self.timed]
        return min([each for each in found if each.is_finite] or found, key=_ms, default=None)

    @known
    def fp8(self) -> Variant | None:
        """The fastest in FP8, of those that train without NaN if BF16 does."""
        trains = self.bf16 is None or self.bf16.is_finite
        return min((each for each in self.in_fp8 if each.is_finite or not trains), key=_ms, default=None)

    def speed(self, of: Variant, against: Variant) -> Number:
        """Divide the times of two timed variants, ``against`` / ``of``, with what noise leaves open."""
        return noise.speed(of.arm, against.arm, self.trial)

    def sure_speed(self, fp8: Variant, bf16: Variant) -> Number | None:
        """Compare a timed FP8 step with a BF16; None if a BF16 without a time may turn the answer.

        One that was left out for time may be faster: then FP8 is known to be slower, or nothing is.
        """
        found = self.speed(fp8, bf16)
        return None if bf16 is self.bf16 and self.late_bf16 and found.high >= 1 else found

    def fair_bf16(self, fp8: Variant | None) -> Variant | None:
        """Find the best BF16 with those changes of an FP8 step that help it too; None if it was not timed.

        If it is slower or does not fit, the best BF16 without them.
        """
        best = self.bf16
        if fp8 is None or best is None:
            return None
        shared = that_help_bf16_too(fp8.changes)
        shared -= {*best.arm.get("treatments", ())}  # an autocast that every BF16 has
        if not shared:
            return best
        in_bf16 = (each for each in self.trial.arms if is_in_bf16(each.get("name", "")))
        alike = [each for each in in_bf16 if changes_in_bf16(each) == shared]
        if timed := [self.timed[each.name] for each in alike if each.tried]:
            return min(*timed, best, key=_ms)
        return best if any(why_of(each) is Reason.DOES_NOT_FIT for each in alike) else None

    @known
    def end(self) -> Variant | None:
        """The variant that the plan ends in: the fewest changes within 2% of the fastest.

        Another precision is a change. The user's own step stays unless another is surely faster, and noise
        ties two of one precision. What is not finite does not count, unless BF16 is not either, and FP8 is no
        fix for it. None if the step as it is, or every BF16, has no time.
        """
        table, now = self.table, self.as_is
        if now is None or all(each.in_fp8 for each in table):
            return None
        if not (self.uses_fp8 or now.is_finite):
            return now
        if any(each.is_finite for each in table if not each.in_fp8):
            table = [each for each in table if each.is_finite]
        table = [each for each in table if not self._awaits_fp8(each)] or [now]
        if now in table:
            table = [each for each in table if each is now or self._is_surely_faster(each, now)]
        fastest = min(table, key=_ms)

        def is_as_fast(each: Variant) -> bool:
            slower = ratio(each.arm, fastest.arm)
            tied = each.in_fp8 == fastest.in_fp8 and slower.low <= 1
            return tied or slower.value <= 1 + noise.SELF_CHECK_TOLERANCE

        def place(each: Variant) -> tuple[object, ...]:
            other = each.in_fp8 != self.uses_fp8
            return not each.is_as_is, len(each.changes) + other, other, each.ms.value

        return min(filter(is_as_fast, table), key=place)

    def _is_surely_faster(self, each: Variant, now: Variant) -> bool:
        faster = self.speed(each, now)
        return faster.side != "open" and faster.low > 1

    def _awaits_fp8(self, of: Variant) -> bool:
        """Return whether a BF16 variant has changes that FP8, as fast without them, had no time for."""
        form, fp8 = self.form_of(of), self.fp8
        if of.in_fp8 or not of.changes or form is None or fp8 is None or _ms(fp8) > _ms(form):
            return False
        late = (all_changes(self.trial, each) for name, each in self.late.items() if not is_in_bf16(name))
        return any({*of.changes} <= {*each} for each in late)

    @cached_property
    def gives_up_fp8(self) -> bool:
        """Return whether the plan takes a job in FP8 to BF16."""
        return self.end is not None and not self.end.in_fp8 and self.uses_fp8

    @known
    def bf16_of_the_plan(self) -> Variant | None:
        """The form of the BF16 that the plan ends in, without its changes; else the fastest."""
        if self.end is None or self.end.in_fp8:
            return self.bf16 if self.on_gpu else None
        return self.form_of(self.end) or self.end

    def form_of(self, of: Variant) -> Variant | None:
        """Find the baseline that a BF16 variant changes, or changes a change of."""
        below: Variant | None = of
        while below is not None and below.name not in BASELINES:
            below = self.timed.get(below.arm.get("base") or "")
        return below

    @known
    def speedup(self) -> Number | None:
        """The step as it is in FP8, compared with the best BF16."""
        if not self.on_gpu or not self.uses_fp8 or not self.as_is or not self.bf16:
            return None
        return self.sure_speed(self.as_is, self.bf16)

    @known
    def bound(self) -> float | None:
        """The most that FP8 can give over the best BF16: its matmuls as fast as profiled, all else free.

        Without FP8 that was profiled they take half their time, as FP8's rate is twice that of BF16. Never
        below a speedup that timing proves. None if the BF16 was not profiled.
        """
        bf16, totals = self.bf16, sorted(self.in_fp8, key=_ms)
        profile = if_recorded(breakdown_of, bf16.arm) if bf16 and self.on_gpu else None
        if bf16 is None or not profile:
            return None
        same_job = (each.arm for each in totals if self.fair_bf16(each) is bf16)
        parts = filter(None, (if_recorded(breakdown_of, each) for each in same_job))
        fp8 = next((each for each in parts if each.families_ms.get("gemm_fp8")), None)
        gemms_ms = part_ms(profile, "GEMMs")
        least_ms = min(part_ms(fp8, "GEMMs"), gemms_ms) if fp8 else gemms_ms / 2
        proven = (ratio(fair.arm, each.arm).low for each in totals if (fair := self.fair_bf16(each)))
        return max([_ms(bf16) / (_ms(bf16) - gemms_ms + least_ms), *proven])

    @cached_property
    def is_decided(self) -> bool:
        """Return whether the plan leaves FP8 off, and FP8 would gain little if its casts were free."""
        little = self.bound is not None and self.bound < LITTLE
        return little and self.gives_up_fp8 and self.late_bf16 is None

    @cached_property
    def savings(self) -> dict[str, Saving]:
        """Treatments that were timed alone on a GPU -> what they save."""
        found: dict[str, Saving] = {}
        for alone in self.timed.values() if self.on_gpu else ():
            base, names = self.base_of(alone), alone.arm.get("treatments", ())
            if base and len(names) == 1 and not is_in_bf16(alone.name):
                found.setdefault(names[0], self.saving(base, alone))
        return found

    def base_of(self, of: Variant) -> Variant | None:
        """Return the variant that ``of`` changes (default ``as_is``), if both were timed."""
        name = None if of.name in BASELINES else of.arm.get("base", ArmName.AS_IS)
        return self.timed.get(name or "")

    def saving(self, before: Variant, after: Variant) -> Saving:
        """Return what a change saves of a step on this trial's GPU, paired by round."""
        pairs = zip(before.arm.rounds_ms, after.arm.rounds_ms, strict=False)
        saved = interval([was - now for was, now in pairs])
        return Saving(
            low=saved.low,
            high=saved.high,
            basis="measured",
            gpu=str(self.trial.get("gpu") or self.trial.get("device", "an unknown device")),
            from_ms=before.arm.step_ms,
            to_ms=after.arm.step_ms,
        )

    # --- what has no time ---

    @known
    def takes_no_conversion(self) -> bool:
        """Return whether the trial could convert no layer by any recipe."""
        tried = [each for each in self.trial.arms if is_conversion(each.name)]
        return bool(tried) and all(why_of(each) is Reason.NOT_APPLICABLE for each in tried)

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
        """The variants that only time kept from being timed, by their names, without what a recipe beats."""
        beaten = {self.timed[name].arm.get("base") for name in FASTEST if name in self.timed}
        named = (each for each in self.facts.arms() if recorded(each, "name") and each.name not in beaten)
        return {each.name: each for each in named if lacked_time(each)}

    @known
    def late_first(self) -> Arm | None:
        """The first variant without a time that comes before all fixes, or a recipe that may win."""
        converted = [each.name for each in self.trial.arms if is_conversion(each.name)]
        names = [ArmName.BF16_AS_COMPILED, ArmName.PRESCRIBED, *converted[:1], ArmName.BF16_COMPILED]
        names += FASTEST
        fp8, bf16 = self.fp8, self.fair_bf16(self.fp8)
        if fp8 and bf16 and 1 / RECIPES_APART < self.speed(fp8, bf16).value < 1 + EVEN:
            names += converted
        return next((self.late[name] for name in names if name in self.late), None)

    @known
    def late_bf16(self) -> Arm | None:
        """The compiled BF16 that had no time and may be the fastest.

        That is BF16 as the user compiles; or block by block, if no compiled BF16 was timed, changed or not.
        """
        forms = ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED
        own = self.late.get(ArmName.BF16_AS_COMPILED)
        compiled = {each.name for each in self.timed.values()} | {
            each.arm.get("base") for each in self.timed.values() if not each.in_fp8
        }
        return own or (self.late.get(ArmName.BF16_COMPILED) if compiled.isdisjoint(forms) else None)

    @known
    def own_bf16_left_out(self) -> Arm | None:
        """The same, if the user compiles: what leaves FP8 off then keeps his own form, without a time."""
        late = self.late_bf16
        own = late and (compiles_any(self.facts) or late.name == ArmName.BF16_AS_COMPILED)
        return late if own and self.uses_fp8 else None

    @known
    def late_fp8(self) -> Arm | None:
        """The FP8 that had no time, and that staying in BF16 waits for.

        Of a job without FP8 the form that the user compiles, unless one was timed or FP8 wins anyway. Of
        another, unless its plan ends in FP8, all fixes together, else what compiles it if nothing did.
        """
        if not self.uses_fp8:
            own = [*filter(keeps_users_compilation, filter(is_conversion, self.words))]
            wins = self.fp8 and self.bf16 and _ms(self.fp8) < _ms(self.bf16)
            decided = wins or any(name in self.timed for name in own)
            return None if decided else next((self.late[name] for name in own if name in self.late), None)
        if (self.end is not None and not self.gives_up_fp8) or self.is_decided:
            return None
        changed = [each for each in self.in_fp8 if not each.is_as_is]
        late = [each for name, each in self.late.items() if self.is_of_use(each) and not is_in_bf16(name)]
        late = [each for each in late if not {*each.treatments} <= that_help_bf16_too(each.treatments)]
        planned = [each for each in late if each.name == ArmName.PRESCRIBED]
        compiled = [] if any(_compiles(each.arm) for each in changed) else list(filter(_compiles, late))
        others = late if self.gives_up_fp8 and not changed else []
        return next(iter(planned or compiled or others), None)

    @cached_property
    def fp8_is_undecided(self) -> bool:
        """Return whether a plan in BF16 rests on FP8 that has no time, or that noise hides."""
        if not self.gives_up_fp8 or self.is_decided:
            return False
        fp8, bf16 = self.fp8, self.fair_bf16(self.fp8)
        return bool(self.late_fp8 or (fp8 and bf16 and self.speed(fp8, bf16).side == "open"))


def _compiles(of: Arm) -> bool:
    return any(family(name) == family(COMPILE_BLOCKS) for name in of.treatments)


def is_faster(facts: Facts) -> bool:
    """Return whether FP8 as it runs was timed as faster than BF16 for sure."""
    found = TrialView(facts).speedup
    return found is not None and found.side == "faster"


def fp8_pays(facts: Facts) -> bool:
    """Return whether a GPU timed a whole FP8 step that is not clearly slower."""
    view = TrialView(facts)
    pairs = ((each, view.fair_bf16(each)) for each in view.in_fp8)
    return any(bf16 and view.speed(of, bf16).side != "slower" for of, bf16 in pairs)
