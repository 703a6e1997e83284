"""The steps that an answer compares: timed on a GPU, else watched, else estimated.

Behind this file nobody asks where a time comes from, except to print its basis.
"""

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import Variant
from fp8doctor.analysis.modelled_speedup import Estimate
from fp8doctor.analysis.noise import gpu_contention
from fp8doctor.analysis.significance import Number, holding
from fp8doctor.analysis.step_difference import REST, UNEXPLAINED, alike, breakdown_of, part_ms, waterfall
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, recipe_in_words, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import Expected, begins_fp8, is_modelled, stays_in_bf16, stops_first
from fp8doctor.diagnosis.savings import together
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName, conversion_to
from fp8doctor.finding import Saving


class Comparison(Struct, frozen=True):
    """The steps that count, and how they compare. What is not known is None."""

    now: Variant | None = None
    """As the user runs it."""
    bf16: Variant | None = None
    """The best BF16 of the same model."""
    fp8: Variant | None = None
    """FP8 as it runs; of a job without FP8, as it would run."""
    end: Variant | None = None
    """The step with the plan; the step as it is if there is nothing to change."""
    speedup: Number | None = None
    """`bf16` / `fp8`."""
    gain: Number | None = None
    """`now` / `end`."""
    best_fp8: Variant | None = None
    """The fastest FP8 that was timed, if the plan leaves FP8 off."""
    end_speedup: Number | None = None
    """BF16 with the changes that help it too / `end`; None if the plan ends in BF16, or without."""
    per_token: bool = False
    """True if the plan changes how many tokens a step has, so that its end is for as many as now."""
    is_fair: bool = False
    """True if the BF16 of `end_speedup` has changes that the best one as it is lacks."""
    parts_ms: dict[str, float] = {}
    """Part of the step -> what FP8 takes longer there; together they are `fp8` - `bf16`."""
    gpu: str = ""
    """The GPU that estimates are of."""
    after: str = ""
    """What has to be done before the step can be estimated, in words."""

    @property
    def timed(self) -> bool:
        """Return whether a GPU timed both steps of the speedup."""
        return self.speedup is not None and self.speedup.basis == "measured"


def comparison(view: TrialView, expected: Expected, steps: Sequence[Step]) -> Comparison:
    """Compare the timed steps if a GPU timed any, else the watched and the estimated ones."""
    found = if_recorded(_timed, view, expected, tuple(steps)) if view.table else None
    if found and (found.speedup or view.uses_fp8 or not found.bf16 or view.late_fp8):
        return found
    estimate = if_recorded(_estimated, view, expected, tuple(steps))
    if found and found.bf16 and estimate and estimate.fp8 and estimate.speedup:
        bf16_ms, speedup = found.bf16.ms.value, estimate.speedup
        ms = Number(bf16_ms / speedup.value, bf16_ms / speedup.high, bf16_ms / speedup.low, "modelled")
        return replace(found, fp8=replace(estimate.fp8, ms=ms), speedup=speedup, gpu=estimate.gpu)
    now = view.watched
    return found or estimate or Comparison(now=now, fp8=now if now and now.in_fp8 else None)


def _timed(view: TrialView, expected: Expected, steps: Sequence[Step]) -> Comparison:
    """Compare what a GPU timed, and in the place of a BF16 that had no time its estimate."""
    now, bf16 = view.as_is, view.bf16
    fp8 = now if view.uses_fp8 else None if view.late_fp8 else view.fp8
    if fp8 and not view.uses_fp8:
        bf16 = view.fair_bf16(fp8)  # it has the fixes that help BF16 too, as the conversion has
    expects = expected.now if view.late_bf16 and now else None
    estimated = None
    if view.late_bf16 and now and expects and expects.now:
        estimated = _late_bf16(view.late_bf16.name, now, expects.now, view)

    def over(fp8: Variant, bf16: Variant | None) -> Number | None:
        """Compare with a timed BF16, or with one whose time is estimated."""
        found = view.sure_speed(fp8, bf16) if bf16 else None
        return _over(fp8, now, estimated.ms, view) if found is None and now and estimated else found

    speedup = over(fp8, bf16) if fp8 else None
    late = estimated if speedup and speedup.basis != "measured" else None
    end = _timed_end(view, steps)
    changed = end if end is not now else None
    fair = view.fair_bf16(changed) if changed and changed.in_fp8 else None
    return Comparison(
        now=now,
        bf16=late or bf16,
        fp8=fp8,
        end=end,
        speedup=speedup,
        gain=view.speed(changed, now) if now and changed else None,
        best_fp8=view.fp8 if view.gives_up_fp8 and steps else None,
        end_speedup=over(changed, fair) if changed and fair else None,
        per_token=changed is not None and changed.arm.get("tokens_ratio", 1.0) != 1,
        is_fair=fair is not None and fair is not bf16,
        parts_ms=_timed_parts(fp8, bf16, view) if speedup and fp8 and bf16 and not late else {},
        gpu=expects.gpu if late and expects else "",
    )


def _timed_end(view: TrialView, steps: Sequence[Step]) -> Variant | None:
    """Find the timed step that the plan ends in; None if its lines keep a compilation that had no time."""
    if view.own_bf16_left_out and stays_in_bf16(steps):
        return None
    if view.as_is is None:
        names = {step.treatment.name for step in steps}
        return next((each for each in view.in_fp8 if {*each.changes} == names), None)
    return view.end if view.end and steps else view.as_is


def _timed_parts(fp8: Variant, bf16: Variant, view: TrialView) -> dict[str, float]:
    """Divide the difference of two profiled steps; empty if others used the GPU, and not for both alike."""
    found = if_recorded(waterfall, fp8.arm, bf16.arm)
    disturbed = gpu_contention(view.trial.get("health")) and not alike(fp8.arm, bf16.arm)
    return found.parts_ms if found and not disturbed else {}


def _late_bf16(name: str, now: Variant, share: Number, view: TrialView) -> Variant:
    """Estimate a BF16 that had no time as a share of the step as it is, no slower than a form that was timed.

    It may be as fast as the timed FP8 tells: its step without casts, with BF16's matmuls. The model knows
    Linears, and compiling fuses other work too: BF16 took 97 ms and not the 166 of the model, this says
    94 (a state-space model on an H200).
    """
    ms, low, high = (now.ms.value * each for each in (share.value, share.low, share.high))
    plain = now if not now.in_fp8 else view.bf16
    profiles = [if_recorded(breakdown_of, each.arm) if each else None for each in (view.fp8, plain)]
    if view.fp8 and all(profiles):
        fp8, bf16 = filter(None, profiles)
        casts_ms = part_ms(fp8, "casts") + part_ms(fp8, "GEMMs") - part_ms(bf16, "GEMMs")
        low = min(low, view.fp8.ms.low - casts_ms)
    most = view.bf16.ms.value if view.bf16 else math.inf
    return Variant(
        name, view.words[name], False, Number(min(ms, most), min(low, most), min(high, most), "modelled")
    )


def _over(fp8: Variant, now: Variant, bf16: Number, view: TrialView) -> Number:
    """Divide BF16, a share of the step as it is, by FP8."""
    gain = view.speed(fp8, now) if fp8 is not now else Number(1.0, 1.0, 1.0)
    value, low, high = (each / now.ms.value for each in (bf16.value, bf16.low, bf16.high))
    return holding(gain.value * value, gain.low * low, gain.high * high, "modelled")


def _estimated(view: TrialView, expected: Expected, steps: Sequence[Step]) -> Comparison | None:
    """Compare estimates with each other, and with the watched step if there is one; None without numbers."""
    expects = expected.now
    if expects is None:
        return None
    bf16_ms, ran = expects.bf16_ms, view.watched if expects.ran_ms else None
    converts = bool(expects.recipes)
    compiled = expects.bf16.compiled and bf16_ms >= expects.bf16.step_ms
    bf16 = _of(ArmName.BF16_COMPILED, "compiled BF16" if compiled else "BF16", False, bf16_ms)
    if ran and converts and math.isclose(bf16_ms, ran.ms.value):
        bf16 = replace(bf16, ms=ran.ms)
    now = ran
    if not ran and expects.now:
        now = _of(ArmName.AS_IS, "as you run it", not converts, bf16_ms / expects.now.value)
    fp8, speedup = now, expects.now
    if converts:
        name, speedup = expects.recipes[0], expects.best
        fp8 = _of(conversion_to(name), f"FP8 {recipe_in_words(name)} compiled", True, bf16_ms / speedup.value)
    rest = expects.fp8_ms - bf16_ms - sum(expects.parts_ms.values())
    found = Comparison(
        now=now,
        bf16=bf16,
        fp8=fp8,
        end=None if steps else now,
        speedup=speedup,
        parts_ms=expects.parts_ms | {UNEXPLAINED if ran else REST: rest}
        if speedup and (converts or not expects.after)
        else {},
        gpu=expects.gpu,
        after=expects.after,
    )
    return _with_plan(found, expects, expected, steps) if steps else found


def _of(name: str, words: str, in_fp8: bool, ms: float) -> Variant:
    """Make an estimated variant."""
    return Variant(name, words, in_fp8, Number(ms, ms, ms, "modelled"))


GAIN = 0.01
"""Gain of a modelled step, from which the plan changes what the cost model knows. A choice."""


def _with_plan(found: Comparison, expects: Estimate, expected: Expected, steps: Sequence[Step]) -> Comparison:
    """Add the estimated step with the plan, for as many tokens; nothing prices what makes a job fit.

    A plan stays in BF16 only if FP8 is not faster, so BF16 takes at most as long as now. A watched step waits
    as long with more tokens, which the estimate does not know.
    """
    now, bf16_ms = expects.now, expects.bf16_ms
    fits = (step for step in steps if recorded(step, "peak_gib"))
    if stops_first(expected.facts, expected.findings) or not all(map(is_modelled, fits)):
        return replace(found, end=found.bf16) if stays_in_bf16(steps) else found
    now_ms = expects.ran_ms or (bf16_ms / now.value if now else 0.0)
    end, over, ms = found.bf16, None, None
    planned = expected.planned(steps)
    as_many = expects.tokens / planned.tokens if planned else 1.0
    with_fixes_ms = as_many * planned.bf16_ms if planned else bf16_ms  # some fixes make BF16 faster too
    found = replace(found, is_fair=bf16_ms / with_fixes_ms - 1 >= GAIN, per_token=as_many != 1)
    if not stays_in_bf16(steps):
        if planned is None or (as_many < 1 and expects.ran_ms):
            return found
        if planned.recipes and not begins_fp8(steps, planned):
            if not any(traits(step.treatment.name).compiles for step in steps):
                return found
            bf16 = found.bf16
            end = _of(bf16.name, bf16.words, False, with_fixes_ms) if bf16 and now else None
            return replace(found, end=end)
        over = planned.best
        end = _of("planned", "with the plan", True, with_fixes_ms / over.value)
        if now and now_ms / end.ms.value - 1 >= GAIN:
            most = (with_fixes_ms + as_many * planned.left_out_ms) / over.low
            ms = holding(with_fixes_ms / over.value, with_fixes_ms / over.high, most, "modelled")
            over = holding(over.value, with_fixes_ms / most, over.high, "modelled")
        elif not (as_many < 1 or expects.after or planned.recipes):
            return found  # the plan changes nothing that the cost model knows
    elif now:
        share = with_fixes_ms / bf16_ms
        low, high = share * now_ms * now.low, share * now_ms * min(now.high, 1.0)
        ms = holding(with_fixes_ms, low, high, "modelled")
    if end is None or ms is None:
        return replace(found, end=end, end_speedup=over)
    gain = now_ms / ms.value  # of the model's error both steps have the same, unless one was watched
    bounds = (now_ms / ms.high, now_ms / ms.low) if expects.ran_ms or ms.high > now_ms else (gain, gain)
    gained = holding(gain, *bounds, "modelled")
    return replace(found, end=replace(end, ms=ms), gain=gained, end_speedup=over)


def _within(step: Step, now: Variant, end: Variant | None = None) -> Step:
    """Estimate no saving beyond the plan's end; one that is surely beyond the step refutes its model."""
    saving, most_ms = step.saving_ms, now.ms.value - (end.ms.low if end else 0.0)
    if saving is None or saving.basis != "modelled" or saving.high < most_ms:
        return step
    within = replace(saving, high=max(saving.low, most_ms)) if saving.low < now.ms.value else None
    return replace(step, saving_ms=within)


def with_its_gain(steps: Sequence[Step], compared: Comparison) -> tuple[Step, ...]:
    """Give the fixes that the cost model knows the estimated saving of the plan: the first has that of all.

    A check counts the kernels of some layers, without the host. A measured plan keeps its savings.
    """
    now, end, gain = compared.now, compared.end, compared.gain
    of = gain or compared.speedup
    if of is not None and of.basis == "measured":
        return tuple(_within(step, now) for step in steps) if now else tuple(steps)
    leaves, saving = [step for step in steps if step.treatment.name == STAY_IN_BF16], None
    held = (list(filter(is_modelled, steps)) or list(steps)) if gain else []
    priced = (each for each in held if each.saving_ms or (leaves and traits(each.treatment.name).then))
    known = [*leaves, *priced] or held
    if gain and now and end:
        ends = [now.ms.value - end.ms.high, now.ms.value - end.ms.low]
        if (off := compared.speedup) and now.ms.basis == "modelled":  # or both times are off together
            ends += [(now.ms.value - end.ms.value) * each / off.value for each in (off.low, off.high)]
        saving = Saving(low=min(ends), high=max(ends), basis="modelled", gpu=compared.gpu)
    steps = together(steps, [step.treatment.name for step in known], saving)
    return tuple(_within(step, now, end if gain else None) for step in steps) if now else steps
