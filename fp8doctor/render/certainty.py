"""How far to trust the answer: is its side sure, and its size; and the upper bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from fp8doctor.analysis.arms import arm, best_bf16, fair_bf16, ratio_on_screen, timed_on_cpu
from fp8doctor.analysis.estimated_gain import GAIN
from fp8doctor.analysis.fp8_request import trains_in_16_bits
from fp8doctor.analysis.modelled_speedup import ERROR, OFF_IN_BALANCE, ModelledSpeedup
from fp8doctor.analysis.noise import (
    Pair,
    copies_differ,
    gpu_contention,
    host_doubt,
    is_noise,
    may_turn,
    self_check_ratio,
    stated_doubt,
)
from fp8doctor.analysis.outcome import MAY_BE_EVEN, ceiling
from fp8doctor.analysis.significance import EVEN, Interval, side
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, that_help_bf16_too
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.diagnosis.answer import GRAVE, own_step_failed
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import failed_early, nothing_in_fp8
from fp8doctor.diagnosis.giving_up import planned_speedup
from fp8doctor.diagnosis.outlook import beginning, counted_in_words
from fp8doctor.diagnosis.planned_gain import why_now_is_unknown
from fp8doctor.facts import Arm, Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.render.causes import state_now, times_slower
from fp8doctor.render.details import numbers
from fp8doctor.render.ended_ranks import ended_rank
from fp8doctor.render.step_parts import estimate_told
from fp8doctor.render.timing import labels
from fp8doctor.wording import in_times, percent, plural, quotient

WIDE = 1.1
"""Upper end of the interval of a ratio / its lower one, from which the size is not sure: a tenth is more than
most fixes of a compiled step give. A convention of this tool."""

SIDES = {-1: "slower", 0: "even", 1: "faster"}
"""Side of a speedup -> what FP8 is then."""


TOLERANCE = f"up to {EVEN:.0%} counts as even"
"""The one sentence on what even means."""


def certainty(report: Document) -> str:
    """Say how sure the answer is: timed and how well, modelled, by rule, or not."""
    verdict, facts = report.verdict, report.facts
    if verdict.status in GRAVE:
        return _of_a_broken_job(report)
    if verdict.basis == "measured":
        return if_recorded(_of_times, report, trial_view(facts)) or "Yes: it was timed."
    if failed_early(facts):
        return "Yes: the script ended before a step was seen."
    if verdict.status == "no_fp8" and not report.prescription and trains_in_16_bits(facts):
        return "Yes: Unsloth multiplies LoRA in 16 bits."
    fault = FROM_THE_JOB if ended_rank(facts) or state_now(report) else ""
    return f"{fault}{_estimated(report)}"


FROM_THE_JOB = "The fault: yes, it was read from the job itself. "


def _estimated(report: Document) -> str:
    """Say on which side of BF16 the advice is, by estimates alone."""
    if nothing_in_fp8(report.verdict, report.facts):
        return "No gain from FP8: yes, by the types of all layers. Nothing was timed."
    told, seen = _side(report), _seen(report)
    if report.verdict.basis == "modelled" or "x the speed" in told:
        return f"{told}. {_error(estimate_told(report))}; {seen}."
    if any(step.saving_ms and step.saving_ms.basis == "modelled" for step in report.prescription):
        return f"{told}. The savings are estimates; {seen}."
    return f"{told}; {seen}."


def _error(expects: ModelledSpeedup | None) -> str:
    """Say how far off the estimate is on this job if that is known, else how far off it was on others."""
    if expects and not expects.describes_no_watched_step and expects.may_be_off == OFF_IN_BALANCE:
        return f"Host and GPU take about as long here: the estimate may be off by {OFF_IN_BALANCE:.0%}"
    if expects is None or not expects.describes_no_watched_step:
        return f"{ERROR[:1].upper()}{ERROR[1:]}"
    times = f"{expects.ran_ms:,.1f} ms where the estimate has {expects.modelled_ms:,.1f}"
    return f"The step takes {times}: the estimate does not describe all of this job"


def _side(report: Document) -> str:
    """Say on which side of 1 the estimates are: as it is, and with the plan unless that leaves FP8 off."""
    status, steps = report.verdict.status, report.prescription
    told = estimate_told(report)
    stays = any(step.treatment.name == STAY_IN_BF16 for step in steps) and not trains_in_16_bits(report.facts)
    plan = if_recorded(planned_speedup, report.facts, report.findings, steps)
    fixed = "in FP8 with every fix" if stays else f"with {counted_in_words(steps)}" if steps else ""
    if told is None and plan:
        now = ""
        if status == "layers_do_not_learn" and not stays:
            now = (
                f"{_as_it_ran(plan) or f'As it is: not known, no estimate ({why_now_is_unknown(report)})'}. "
            )
        return f"{now}{_likely(plan.wins, plan.loses, fixed)}, {plan.range} the speed of BF16"
    if told is None:
        on_side = stays or status in ("fp8_faster", "fp8_slower")
        side_of = "Not faster (estimated)" if stays else "Faster" if status == "fp8_faster" else "Slower"
        unknown = f"Faster or slower: not known, no estimate ({why_now_is_unknown(report)})"
        return f"{side_of}: likely" if on_side else unknown
    if told.recipes or not steps:
        return _as_it_is(report, told, "")
    now = _as_it_is(report, told, "as it is")
    if plan is None or (told.as_is is not None and (stays or abs(plan.best / told.as_is - 1) < GAIN)):
        return now
    return f"{now}. {_likely(plan.wins, plan.loses, fixed)}"


def _as_it_is(report: Document, told: ModelledSpeedup, state: str) -> str:
    """Say on which side the step as it is, or the conversion of a job without FP8."""
    if told.recipes:
        return _likely(told.wins, told.loses, state)
    if told.as_is is not None:
        return _likely(told.as_is_wins, told.as_is_loses, state)
    if now := _as_it_ran(told):
        return now
    slower = times_slower(report, told)
    if slower is None:
        return f"As it is: not known, no estimate ({why_now_is_unknown(report)})"
    return f"Slower as it is: likely, {' to '.join(dict.fromkeys(map(in_times, slower)))}"


def _as_it_ran(expects: ModelledSpeedup) -> str:
    """Say on which side the watched step is if nothing else of it is known; empty without one."""
    if (bounds := expects.now_bounds) is None or expects.as_is is not None:
        return ""
    low, high = bounds
    return f"{_likely(low >= 1, high <= 1, 'as it is')}, {low:.2f} to {high:.2f}x the speed of BF16"


def _likely(wins: bool, loses: bool, state: str) -> str:
    what = f"{'Slower' if loses else 'Faster'}{state and f' {state}'}"
    return f"{what}: {'likely' if wins or loses else 'not known, the estimate allows both'}"


def _of_a_broken_job(report: Document) -> str:
    """Say how the fault was seen, then how sure the speed is: as it is if FP8 goes, else with the fix."""
    facts, view = report.facts, trial_view(report.facts)
    ran = [each for each in facts.arms() if each.get("tried")]
    goes = if_recorded(_of_times, report, view) if view.gives_up_fp8 and view.as_is else ""
    speed = (
        goes
        or if_recorded(_with_the_fix, view, report.prescription)
        or (_not_compared(view, "; ".join(_doubts(view))) if ran else _estimated(report))
    )
    if own_step_failed(facts):
        return f"The fault: yes, the step failed when it ran. {speed}"
    if any(each.get("non_finite") for each in ran):
        return f"The fault: yes, the timed steps show it. {speed}"
    return f"{FROM_THE_JOB}{speed}"


def _not_compared(view: TrialView, doubts: str) -> str:
    """Say what is known of FP8 that was not timed next to its BF16."""
    unsure = f" The times may be off: {doubts}." if doubts else ""
    if view.has_little_to_gain:
        return f"FP8 is not faster: yes, by the upper bound of {view.bound:.2f}x.{unsure}"
    return f"{NOT_COMPARED}.{unsure}"


NOT_COMPARED = "Faster or slower: not known, FP8 was not compared with BF16"


def _with_the_fix(view: TrialView, steps: Sequence[Step]) -> str:
    """Say how sure the speed of the plan's FP8 step is, else of the fastest; empty if none was timed."""
    fp8 = view.end.arm if view.end and not view.end.in_bf16 else view.fp8
    bf16 = if_recorded(fair_bf16, view.facts, fp8) if fp8 else None
    if fp8 is None or bf16 is None or timed_on_cpu(view.facts):
        return ""
    speed, doubts = _bounded(bf16, fp8, view), "; ".join(_doubts(view))
    rounds, why = f"in {plural(len(fp8.rounds_ms), 'round')}", f": {doubts}" if doubts else ""
    fixed = labels(view.facts, numbers(steps))[fp8.name]
    if is_noise(bf16, fp8, view.facts.trial) or not side(speed.median):
        return f"{'No' if doubts else 'Yes'}: {fixed} runs at {_speed(speed)} {rounds}{why}."
    answer, size = _answer(speed), _size(speed)
    if doubts:
        return f"{fixed} is {answer}: yes. How much: no, {size} {rounds}{why}."
    return f"Yes: {fixed} is {size} {answer} {rounds} (90% interval)."


def _bounded(bf16: Arm, fp8: Arm, view: TrialView) -> Interval:
    """Divide two times; the upper bound ends the interval unless the median is above it."""
    speedup = ratio_on_screen(bf16, fp8)
    most = view.bound if view.bf16 and bf16.name == view.bf16.name else None
    return replace(speedup, high=most) if most and speedup.median <= most < speedup.high else speedup


def _answer(speedup: Interval) -> str:
    """Say on which side the median is, and that an end of the interval is even."""
    near = {side(speedup.low), side(speedup.high)}
    return f"{SIDES[side(speedup.median)]}{' or even' if 0 in near else ''}"


def _of_times(report: Document, view: TrialView) -> str:
    """Say whether the side is sure, then whether the size is, with the 90% interval of the ratio."""
    uses_fp8 = view.uses_fp8
    fp8, bf16 = (view.as_is if uses_fp8 else view.fp8), view.bf16
    if timed_on_cpu(view.facts):
        return "Not for a GPU: the steps were timed on a CPU."
    if fp8 is None or bf16 is None:
        return f"No: {'BF16' if uses_fp8 else 'FP8'} was not timed."
    speedup, doubts = _bounded(bf16, fp8, view), list(_doubts(view))
    turns, busy = may_turn(Pair(fp8, bf16), view.facts.trial), view.host_contention
    advice = f" On a quiet CPU the advice may change ({busy})." if busy and not turns else ""
    because = "; ".join([*doubts, *([f"the CPU was busy, {busy}"] if busy and turns else [])])
    rounds = f"in {plural(len(fp8.rounds_ms), 'round')}"
    wide = speedup.high / speedup.low >= WIDE
    because = because or ("the rounds differ by a tenth or more" if wide else "")
    end = f"{f': {because}' if because else ''}.{advice}"
    if report.verdict.status == "too_noisy" or (view.fp8_is_noise and not uses_fp8):
        return f"No: {_speed(speedup)} {rounds}{end}"
    answer, size, then = _answer(speedup), _size(speedup), _promised(view, report.prescription)
    if view.may_become_even and not view.side_is_wrong:
        either = f"{SIDES[side(speedup.median)]} or even".capitalize()
        return f"{either}: yes. Which of the two: no, {MAY_BE_EVEN}{end}"
    if turns or view.side_is_wrong:
        return f"No, the answer may change on a quiet machine{end}"
    if not side(speedup.median):
        beyond = side(speedup.low) or side(speedup.high)
        now = " as it is" if view.uses_fp8 and view.end and not view.end.is_as_is else ""
        answer = f"even{f' or {SIDES[beyond]}' if beyond else ''}{now}"
        return f"Yes: {answer}, {size} {rounds} ({TOLERANCE}){end}{then}"
    even = f"; {TOLERANCE}" if " or " in answer else ""
    told = f"{answer}, {size}" if even else f"{size} {answer}"
    if not because:
        return f"Yes: {told} {rounds} (90% interval{even}).{advice}{then}"
    return f"{answer.capitalize()}: yes. How much: no, {size} {rounds}{end}{then}"


def _promised(view: TrialView, steps: Sequence[Step]) -> str:
    """Write the intervals of a plan's end, unless it is the best BF16: the title's FP8 has those."""
    end, now = view.end, view.as_is
    if not steps or end is None or now is None or end.is_as_is or now is view.bf16 or end.arm is view.bf16:
        return ""
    bf16 = None if end.in_bf16 or not view.uses_fp8 else if_recorded(fair_bf16, view.facts, end.arm)
    gain = ratio_on_screen(now, end.arm)
    than_bf16 = f", {_against_bf16(ratio_on_screen(bf16, end.arm))}" if bf16 else ""
    size = _size(gain) if side(gain.median) else f"{gain.low:.2f}x to {gain.high:.2f}x"
    return f" {beginning(end.arm, steps, end)}: {size} faster than now{than_bf16}."


def _against_bf16(speedup: Interval) -> str:
    of = side(speedup.median)
    return f"{_size(speedup)} {SIDES[of]} than BF16" if of else _size(speedup)


def _size(speedup: Interval) -> str:
    """Write the interval as times faster or slower."""
    if not side(speedup.median):
        return _speed(speedup)
    low, high = speedup.low, speedup.high
    ends = (1 / high, 1 / low) if speedup.median < 1 else (low, high)
    told = [in_times(each) for each in ends]
    if told[0] == told[1]:  # rounded outwards, the title's size lies between
        unit = 0.1 if ends[0] >= 2 else 0.01
        told = [in_times(unit * math.floor(ends[0] / unit)), in_times(unit * math.ceil(ends[1] / unit))]
    return " to ".join(told)


def _speed(speedup: Interval) -> str:
    ends = dict.fromkeys((f"{speedup.low:.2f}x", f"{speedup.high:.2f}x"))
    return f"{' to '.join(ends)} the speed of BF16"


def _doubts(view: TrialView) -> Iterator[str]:
    """Say what may have changed the times."""
    trial, skipped = view.facts.trial, view.facts.get("training.layerdrop")
    if view.speed and view.speed.bound:
        shown = f"{view.speed.speedup.median:.2f}x"
        yield f"{shown} is above the bound of {view.speed.bound:.2f}x that its kernel times give"
    if copies_differ(trial):
        yield f"two copies of one step differ by {100 * abs((self_check_ratio(trial) or 1.0) - 1):.1f}%"
        yield from filter(None, (gpu_contention(trial.get("health")), if_recorded(host_doubt, trial)))
    elif why := if_recorded(stated_doubt, trial):
        yield why
    if skipped:
        yield f"LayerDrop skips {percent(100 * skipped)} of the layers at random"


def _seen(report: Document) -> str:
    facts, steps = report.facts, report.facts.get("observed.steps_ms", ())
    if steps:
        other = "FP8 training" if report.verdict.status in ("no_fp8", "fp8_not_engaged") else "BF16"
        return f"{plural(len(steps), 'step')} were timed as they ran, {other} was not"
    sees = facts.get("software.cuda") and any(gpu.get("visible", True) for gpu in facts.get("gpus", ()))
    why = WITHOUT_TRIAL.get(str(facts.get("target.kind")) if sees else "", "no trial ran")
    why = why if facts.get("gpus") else "no GPU here"
    return f"nothing was timed{'' if recorded(facts, 'trial') else f' ({why})'}"


WITHOUT_TRIAL = {
    "file": "it ran with --no-trial",
    "module": "it ran with --no-trial",
    "live": "inspect_model ran with trial=False",
    "script": "copies are timed with --stop",
}
"""Kind of target -> why a job has no trial, though torch sees a GPU."""


RESTS_ON = {"measured": "from measured kernel times", "modelled": "estimated from the datasheet"}
"""Basis of the bound -> what it was computed from."""


def limit(facts: Facts, steps: Sequence[Step]) -> str:
    """Write the upper bound; empty if unknown, or if it does not hold for the plan.

    The bound is on the step with the best BF16 as it is. A plan that makes BF16 faster too goes beyond it. A
    disturbed step bounds nothing.
    """
    most = ceiling(facts)
    bound = most.of_the_job if most and not trial_view(facts).size_is_wrong else None
    if most is None or bound is None or that_help_bf16_too(step.treatment.name for step in steps):
        return ""
    planned, bf16 = arm(facts.trial, ArmName.PRESCRIBED), best_bf16(facts)
    if planned and bf16 and (quotient(bf16.step_ms, planned.step_ms) or 0.0) > bound:
        return ""
    how = RESTS_ON["modelled" if most.in_step_ms is None and most.basis == "modelled" else "measured"]
    if planned and most.basis == "measured" and most.source.endswith(planned.name):
        how = f"from kernel times measured in {labels(facts, numbers(steps))[planned.name]}"
    return f"Upper bound: {bound:.2f}x BF16, if FP8 changed only the matmuls ({how})."
