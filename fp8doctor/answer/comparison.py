"""The steps that an answer compares: timed on a GPU, else watched, else estimated.

Behind this file nobody asks where a time comes from, except to print its basis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import Estimate
from fp8doctor.analysis.noise import speed
from fp8doctor.analysis.own_step import watched
from fp8doctor.analysis.significance import Number, holding, interval
from fp8doctor.analysis.step_difference import REST, waterfall
from fp8doctor.analysis.treatment_table import MORE_TOKENS, STAY_IN_BF16, recipe_in_words
from fp8doctor.analysis.trial_view import TrialView, Variant
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import (
    begins_fp8,
    expected_speedup,
    is_modelled,
    planned_speedup,
    stays_in_bf16,
    stops_first,
)
from fp8doctor.diagnosis.fitting import MAKES_FIT
from fp8doctor.facts import Arm, Facts, if_recorded
from fp8doctor.facts.arm_names import ArmName, conversion_to
from fp8doctor.finding import Finding, Saving


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
    lacks_fair_bf16: bool = False
    """True if BF16 with those changes of `end` that help it too was not timed."""
    end_speedup: Number | None = None
    """BF16 with the changes that help it too / `end`; None if the plan ends in BF16."""
    is_fair: bool = False
    """True if the BF16 of `end_speedup` has changes that the best one as it is lacks."""
    parts_ms: dict[str, float] = {}
    """Part of the step -> what FP8 takes longer there; together they are `fp8` - `bf16`."""
    gpu: str = ""
    """The GPU that estimates are of."""
    as_is: float | None = None
    """The estimated speedup of the step as it is."""
    after: str = ""
    """What has to be done before the step can be estimated, in words."""


def comparison(view: TrialView, findings: Sequence[Finding], steps: Sequence[Step]) -> Comparison:
    """Compare the timed steps if a GPU timed any, else the watched and the estimated ones."""
    found = _timed(view, steps) if view.table else None
    if found and (found.speedup or view.uses_fp8 or not found.bf16 or view.own_fp8_left_out):
        return found
    estimate = if_recorded(_estimated, view.facts, findings, tuple(steps))
    if found and found.bf16 and estimate and estimate.fp8 and estimate.speedup:
        bf16_ms, speedup = found.bf16.ms.value, estimate.speedup
        ms = Number(bf16_ms / speedup.value, bf16_ms / speedup.high, bf16_ms / speedup.low, "modelled")
        return replace(found, fp8=replace(estimate.fp8, ms=ms), speedup=speedup, gpu=estimate.gpu)
    return found or estimate or _watched(view.facts)


def _timed(view: TrialView, steps: Sequence[Step]) -> Comparison:
    """Compare what a GPU timed."""
    trial, rows = view.facts.trial, {each.name: each for each in view.table or []}

    def row(of: Arm | None) -> Variant | None:
        return rows.get(of.name) if of else None

    now, bf16 = row(view.as_is), row(view.bf16)
    fp8 = now if view.uses_fp8 else None if view.own_fp8_left_out else row(view.fp8)
    against = row(view.fair_bf16(fp8.arm)) if fp8 and not view.uses_fp8 else bf16
    speedup = view.speedup
    if fp8 and against and not view.uses_fp8:
        speedup = speed(fp8.arm, against.arm, trial)
    end = view.end if view.end and steps else now
    if view.own_bf16_left_out and stays_in_bf16(steps):
        end = None  # the lines keep the user's own compile, under which BF16 was not timed
    changed = end if end is not now else None
    fair = row(view.fair_bf16(changed.arm)) if changed and changed.in_fp8 else None
    parts = if_recorded(waterfall, fp8.arm, against.arm) if speedup and fp8 and against else None
    return Comparison(
        now=now,
        bf16=bf16,
        fp8=fp8,
        end=end,
        speedup=speedup,
        lacks_fair_bf16=changed is not None and changed.in_fp8 and fair is None,
        gain=speed(changed.arm, now.arm, trial) if now and changed else None,
        best_fp8=row(view.fp8) if view.gives_up_fp8 and steps else None,
        end_speedup=speed(changed.arm, fair.arm, trial) if changed and fair else None,
        is_fair=fair is not None and fair is not bf16,
        parts_ms=parts.parts_ms if parts else {},
    )


def _watched(facts: Facts) -> Comparison:
    """Take the step of a watched script, if a GPU ran it."""
    step = watched(facts) if facts.get("observed.clock") == "cuda" else None
    if step is None:
        return Comparison()
    in_fp8 = any(each.get("use") == "training" for each in facts.linears())
    now = Variant(step.name, "as you run it", in_fp8, interval(step.rounds_ms), len(step.rounds_ms))
    return Comparison(now=now, fp8=now if in_fp8 else None)


def _estimated(facts: Facts, findings: Sequence[Finding], steps: Sequence[Step]) -> Comparison | None:
    """Compare estimates with each other, and with the watched step if there is one; None without numbers."""
    expects = expected_speedup(facts, findings)
    if expects is None:
        return None
    bf16_ms, ran = expects.bf16_ms, _watched(facts).now if expects.ran_ms else None
    converts = bool(expects.recipes)
    speedup = expects.best if converts else expects.now
    compiled = expects.bf16.compiled and bf16_ms >= expects.bf16.step_ms
    bf16 = _of(ArmName.BF16_COMPILED, "compiled BF16" if compiled else "BF16", False, bf16_ms)
    if ran and converts and math.isclose(bf16_ms, ran.ms.value):
        bf16 = replace(bf16, ms=ran.ms)
    now_ms = bf16_ms / expects.now.value if expects.now else None
    now = ran or (_of(ArmName.AS_IS, "as you run it", not converts, now_ms) if now_ms else None)
    name = next(iter(expects.recipes), "")
    words = f"FP8 {recipe_in_words(name)} compiled"
    fp8 = _of(conversion_to(name), words, True, bf16_ms / expects.best.value) if converts else now
    rest = expects.fp8_ms - bf16_ms - sum(expects.parts_ms.values())
    plan = _planned(facts, findings, steps, expects, bf16) if steps else Plan(now)
    return Comparison(
        now=now,
        bf16=bf16,
        fp8=fp8,
        end=plan.end,
        speedup=speedup,
        gain=plan.gain,
        end_speedup=plan.end_speedup,
        parts_ms=expects.parts_ms | {REST: rest} if speedup and (converts or not expects.after) else {},
        gpu=expects.gpu,
        as_is=expects.now.value if expects.now and not expects.after else None,
        after=expects.after,
    )


def _of(name: str, words: str, in_fp8: bool, ms: float) -> Variant:
    """Make an estimated variant."""
    return Variant(name, words, in_fp8, Number(ms, ms, ms, "modelled"))


class Plan(NamedTuple):
    """The step with the plan, its gain over the step now, and its speed next to BF16; None if unknown."""

    end: Variant | None = None
    gain: Number | None = None
    end_speedup: Number | None = None


def _planned(
    facts: Facts, findings: Sequence[Finding], steps: Sequence[Step], expects: Estimate, bf16: Variant
) -> Plan:
    """Estimate the step with the plan; nothing prices what makes a job fit."""
    if stops_first(facts, findings) or any(step.treatment.name in MAKES_FIT for step in steps):
        return Plan()
    if stays_in_bf16(steps):
        ms, gain = _with_plan(expects, None) or (bf16.ms, None)
        return Plan(replace(bf16, ms=ms), gain)
    planned = planned_speedup(facts, findings, steps)
    if planned is None or (planned.recipes and not begins_fp8(steps, planned)):
        return Plan()
    if any(step.treatment.name == MORE_TOKENS for step in steps):
        if expects.ran_ms:
            return Plan()  # the watched step waits as long with more tokens: the estimate does not
        found = None
    else:
        found = _with_plan(expects, planned)
        if found is None and not expects.after and not planned.recipes:
            return Plan()  # the plan changes nothing that the cost model knows
    end = _of("planned", "with the plan", True, planned.bf16_ms / planned.best.value)
    ms, gain = found or (end.ms, None)
    return Plan(replace(end, ms=ms), gain, planned.best)


GAIN = 0.01
"""Gain of a modelled step, from which the plan changes what the cost model knows. A choice."""


def _with_plan(now: Estimate, planned: Estimate | None) -> tuple[Number, Number] | None:
    """Estimate the step with the plan, or in the best BF16 if ``planned`` is None, and its gain over now.

    None if the step now is unknown, or if the plan gains nothing that the model knows. A plan stays in BF16
    only if FP8 is not faster, so BF16 takes at most as long as now.
    """
    if not now.now:
        return None
    bf16_ms, found, left_ms = now.bf16_ms, now.now, now.left_out_ms
    now_ms = now.ran_ms or bf16_ms / found.value
    if planned is None:
        ms, least, most = bf16_ms, now_ms * found.low, now_ms * min(found.high, 1.0)
    elif planned.best.value / found.value - 1 < GAIN:
        return None
    else:
        best, left_ms = planned.best, planned.left_out_ms
        ms, least, most = bf16_ms / best.value, bf16_ms / best.high, (bf16_ms + left_ms) / best.low
    after = holding(ms, least, most, "modelled")
    gain = now_ms / ms  # of the model's error both steps have the same, unless some time is unexplained
    bounds = (now_ms / most, now_ms / least) if left_ms else (gain, gain)
    return after, holding(gain, *bounds, "modelled")


def with_its_gain(steps: Sequence[Step], compared: Comparison) -> tuple[Step, ...]:
    """Give the fixes that the cost model knows the estimated saving of the plan: the first has that of all.

    A check counts the kernels of some layers, without the host. A measured plan keeps its savings.
    """
    now, end, gain = compared.now, compared.end, compared.gain
    of = gain or compared.speedup
    if of is not None and of.basis == "measured":
        return tuple(steps)
    if stays_in_bf16(steps):
        held = [step for step in steps if step.treatment.name == STAY_IN_BF16]
    else:
        held = list(filter(is_modelled, steps)) if gain else []
    known = [step for step in held if step.saving_ms] or held
    saving = None
    if gain and now and end:
        low, high = now.ms.value - end.ms.high, now.ms.value - end.ms.low
        saving = Saving(low=low, high=high, basis="modelled", gpu=compared.gpu)
    given = list(steps)
    for place, step in enumerate(steps):
        if step in known:
            others = tuple(each.treatment.name for each in known if each is not step)
            given[place] = replace(step, saving_ms=saving if step is known[0] else None, together=others)
    return tuple(given)
