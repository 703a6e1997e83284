"""The variants of a trial: their names, who is compared with whom, and what a change saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8doctor.analysis.own_step import own_words
from fp8doctor.analysis.significance import Interval, Number, interval
from fp8doctor.analysis.treatment_table import (
    AS_YOU_RUN_IT,
    CHECKPOINTING_OFF,
    COMPILE_BLOCKS,
    VARIANTS,
    family,
    in_words,
    that_help_bf16_too,
    variant,
)
from fp8doctor.facts import Arm, Facts, Trial, Unrecorded, recorded
from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    LEFT_OUT_FOR_TIME,
    ArmName,
    Reason,
    change_in_bf16,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
)
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Saving
from fp8doctor.wording import quotient

BF16_WITH = {
    frozenset({CHECKPOINTING_OFF}): ArmName.BF16_WITHOUT_CHECKPOINTING,
}
"""Changes that help BF16 too -> BF16 with them, if there is such a variant."""


def timed_on_cpu(facts: Facts) -> bool:
    """Return whether the trial ran on a CPU."""
    return bool(facts.get("trial.device") == "cpu")


def timed_on_gpu(facts: Facts) -> bool:
    """Return whether the trial ran on a GPU."""
    return recorded(facts, "trial") and not timed_on_cpu(facts)


def arm(trial: Trial, name: str) -> Arm | None:
    """Return the variant of that name, if it was timed."""
    return next((each for each in trial.arms if each.name == name and each.tried), None)


def arm_if_any(facts: Facts, name: str) -> Arm | None:
    """Return the variant of that name, if there was a trial that timed it."""
    return arm(facts.trial, name) if recorded(facts, "trial") else None


def arm_in_time(trial: Trial, name: str) -> Arm | None:
    """Return the variant of that name, if it was timed.

    Raises `Unrecorded` if only time was lacking: then the answer is unknown.
    """
    planned = next((each for each in trial.arms if each.name == name and lacked_time(each)), None)
    if planned is not None:
        raise Unrecorded(Arm, "step_ms", f"{name}: {planned.reason}")
    return arm(trial, name)


def all_too_large(trial: Trial) -> dict[tuple[str, ...], Arm]:
    """Map the treatments of each variant that does not fit in memory to that variant."""
    too_large = (each for each in trial.arms if not each.tried and why_of(each) is Reason.DOES_NOT_FIT)
    return {each.treatments: each for each in reversed([*too_large]) if recorded(each, "treatments")}


def best_bf16(facts: Facts) -> Arm | None:
    """Find the fastest timed BF16 of the same model.

    Without FP8, also outside of layers, the job as it is counts too.
    """
    names = BF16_BASELINES if uses_fp8(facts) or facts.get("network.fp8_calls") else BASELINES
    timed = [found for name in names if (found := arm(facts.trial, name))]
    return min(timed, key=lambda each: each.step_ms or 0.0, default=None)


def left_out_bf16(trial: Trial) -> Arm | None:
    """Find the compiled BF16 that was left out for time and may be the fastest.

    That is BF16 as the user compiles; or block by block, if no compiled BF16 was timed.
    """
    compiled = (ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED)
    left_out = {each.name: each for each in trial.arms if lacked_time(each)}
    own = left_out.get(ArmName.BF16_AS_COMPILED)
    if own or any(arm(trial, name) for name in compiled):
        return own
    return left_out.get(ArmName.BF16_COMPILED)


def own_bf16_left_out(facts: Facts) -> Arm | None:
    """Find BF16 as the user compiles a job in FP8, if the budget left no time for it."""
    left_out = left_out_bf16(facts.trial)
    compiles = any(linear.get("compiled") is not None for linear in facts.linears())
    own = left_out and (compiles or left_out.name == ArmName.BF16_AS_COMPILED)
    return left_out if own and uses_fp8(facts) else None


def lacked_time(planned: Arm) -> bool:
    """Return whether the budget left no time for a variant."""
    return not planned.tried and why_of(planned) in LEFT_OUT_FOR_TIME


def is_finite(timed: Arm) -> bool:
    """Return whether no loss or gradient of a step was seen to be NaN or infinite."""
    return not timed.get("non_finite")


def best_fp8(facts: Facts) -> Arm | None:
    """Find the fastest total in FP8, of those that train without NaN if BF16 does."""
    bf16, totals = best_bf16(facts), fp8_totals(facts)
    if bf16 is None or is_finite(bf16):
        totals = list(filter(is_finite, totals))
    return min(totals, key=lambda each: each.step_ms or 0.0, default=None)


def fp8_totals(facts: Facts) -> list[Arm]:
    """List the timed totals in FP8: the step as it is, then changed; else the conversions."""
    trial, in_fp8 = facts.trial, uses_fp8(facts)
    as_is = arm(trial, ArmName.AS_IS) if in_fp8 else None
    changed = [
        each for each in trial.arms if each.tried and (is_total(each) if in_fp8 else is_conversion(each.name))
    ]
    return [*filter(None, [as_is]), *changed]


def is_total(each: Arm) -> bool:
    """Return whether it is a changed step that a user could run."""
    treatments = each.get("treatments", ())
    return (
        each.name not in (ArmName.AS_IS, ArmName.WITHOUT_ADAPTERS)
        and not is_in_bf16(each.name)
        and not is_withdrawn(each.name, *treatments)
        and bool(treatments)
    )


def fair_bf16(facts: Facts, fp8: Arm) -> Arm | None:
    """Find the best BF16 with those changes of ``fp8`` that help BF16 too; None if it was not timed.

    If it is slower or does not fit, the best BF16 without them.
    """
    best = best_bf16(facts)
    shared = that_help_bf16_too(all_changes(facts.trial, fp8) if uses_fp8(facts) else ())
    shared -= {*best.get("treatments", ())} if best else set()  # an autocast that every BF16 has
    alike = (each for each in facts.trial.arms if is_in_bf16(each.name))
    same = (each for each in alike if changes_in_bf16(each.name, each.get("treatments", ())) == shared)
    planned = next(same, None) if shared else best
    if planned is None or planned.tried:
        return min(filter(None, (planned, best)), key=lambda each: each.step_ms or 0.0) if planned else None
    return best if why_of(planned) is Reason.DOES_NOT_FIT else None


def changes_in_bf16(name: str, treatments: Iterable[str]) -> frozenset[str]:
    """Name what a BF16 variant changes besides leaving FP8 off; empty for a baseline."""
    if name == ArmName.BF16_PRESCRIBED or change_in_bf16(name):
        return frozenset(treatments)
    return next((changes for changes, each in BF16_WITH.items() if each == name), frozenset())


def all_changes(trial: Trial, of: Arm) -> list[str]:
    """List the treatments of a variant, and of all that it is built on.

    Of a family the last stands: a recipe takes the place of the base's.
    """
    arms = {each.name: each for each in trial.arms}
    below: Arm | None = of
    found: dict[str, str] = {}
    while below is not None:
        found = {family(name): name for name in below.get("treatments", ())} | found
        below = arms.pop(below.get("base") or "", None)
    return [*found.values()]


def uses_fp8(facts: Facts) -> bool:
    """Return whether a layer of the model is set up for FP8 training."""
    return any(linear.use == "training" for linear in facts.network.linears)


def round_ratios(a: Arm, b: Arm) -> list[float]:
    """Divide the times of ``a`` by those of ``b``, paired by round: rounds share clocks."""
    return [x / y for x, y in zip(a.rounds_ms, b.rounds_ms, strict=False)]


def ratio(a: Arm, b: Arm) -> Number:
    """Divide the two times on the screen, with the interval of their rounds around it.

    The median over the rounds is another number: 0.23 where the two medians, 92.5 and 448.0 ms, give 0.21.
    """
    if len(a.rounds_ms) != len(b.rounds_ms):
        return as_shown(ratio_apart(a.rounds_ms, b.rounds_ms), a.step_ms, b.step_ms)
    return as_shown(interval(round_ratios(a, b)), a.step_ms, b.step_ms)


def as_shown(rounds: Interval, a_ms: float | None, b_ms: float | None) -> Number:
    """Put the quotient of two shown times into the interval of their rounds."""
    shown = quotient(a_ms, b_ms) or rounds.median
    return Number(shown, min(rounds.low, shown), max(rounds.high, shown))


def ratio_apart(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Divide times that share no rounds."""
    over, under = interval(a), interval(b)
    return Interval(median=over.median / under.median, low=over.low / under.high, high=over.high / under.low)


def base_of(trial: Trial, of: Arm) -> Arm | None:
    """Return the variant that ``of`` changes (default ``as_is``), if both were timed."""
    if of.name in BASELINES:
        return None
    name = of.get("base", ArmName.AS_IS)
    return arm(trial, name) if name else None


def saved_ms(base: Arm, changed: Arm) -> Interval:
    """Compute the saving of a change in ms per step, paired by round."""
    return interval([a - b for a, b in zip(base.rounds_ms, changed.rounds_ms, strict=False)])


def measured_saving(trial: Trial, base: Arm, changed: Arm) -> Saving:
    """Return what a change saves of a step on this trial's GPU."""
    saved = saved_ms(base, changed)
    return Saving(
        low=saved.low,
        high=saved.high,
        basis="measured",
        gpu=str(trial.get("gpu") or trial.get("device", "an unknown device")),
        from_ms=base.step_ms,
        to_ms=changed.step_ms,
    )


def savings(facts: Facts) -> dict[str, Saving]:
    """Compute the ms that each treatment alone saves of a step on a GPU."""
    found: dict[str, Saving] = {}
    for alone in facts.arms() if timed_on_gpu(facts) else ():
        if alone.tried and len(alone.get("treatments", ())) == 1:
            base = base_of(facts.trial, alone)
            if base is not None and not is_in_bf16(alone.name):
                found.setdefault(alone.treatments[0], measured_saving(facts.trial, base, alone))
    return found


def labels(facts: Facts) -> dict[str, str]:
    """Name every variant of a trial."""
    fp8, own = recorded(facts, "network") and uses_fp8(facts), own_words(facts)
    return {arm.name: _label(arm, facts.arms(), fp8, own) for arm in facts.arms()}


def _label(arm: Arm, arms: Sequence[Arm], fp8: bool, own: str = AS_YOU_RUN_IT) -> str:
    """Name a variant by what it changes, and by what the variant changes that it is built on."""
    name, alone = arm.name, arm.get("treatments", ())
    if alone and (name in (ArmName.PRESCRIBED, ArmName.BF16_PRESCRIBED) or is_withdrawn(name)):
        return ", ".join(("BF16" if name == ArmName.BF16_PRESCRIBED else "FP8", *map(in_words, alone)))
    if name == ArmName.AS_IS or (name in VARIANTS and name != ArmName.WITHOUT_ADAPTERS):
        return variant(arm.name, fp8, own=own)
    again = alone == (COMPILE_BLOCKS,) and any(each.name == ArmName.BF16_AS_COMPILED for each in arms)
    base = next((each for each in arms if each.name == arm.get("base")), None)
    kinds = {family(each) for each in alone}  # of which the last stands
    below = [each for each in base.get("treatments", ()) if family(each) not in kinds] if base else []
    own_name = variant(arm.name, fp8, own=own, change="by block" if again else "")
    return ", ".join((own_name, *map(in_words, below)))
