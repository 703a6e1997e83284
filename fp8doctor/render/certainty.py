"""How far to trust the answer: is its side sure, and its size; and the upper bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8doctor.analysis.arms import arm, best_bf16, ratio_on_screen, timed_on_cpu
from fp8doctor.analysis.modelled_speedup import ERROR
from fp8doctor.analysis.noise import (
    Pair,
    copies_differ,
    gpu_contention,
    host_doubt,
    may_turn,
    self_check_ratio,
    stated_doubt,
)
from fp8doctor.analysis.outcome import ceiling
from fp8doctor.analysis.significance import Interval, side
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, that_help_bf16_too
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.diagnosis.answer import GRAVE, own_step_failed
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import failed_early
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.render.causes import ended_rank, estimate_told, state_now
from fp8doctor.wording import in_times, percent, plural

WIDE = 1.1
"""Upper end of the interval of a ratio / its lower one, from which the size is not sure: a tenth is more than
most fixes of a compiled step give. A convention of this tool."""

SIDES = {-1: "slower", 0: "even", 1: "faster"}
"""Side of a speedup -> what FP8 is then."""


def certainty(report: Document) -> str:
    """Say how sure the answer is: timed and how well, modelled, by rule, or not."""
    verdict, facts = report.verdict, report.facts
    watched = plural(len(facts.observed.steps_ms), "step") if _was_watched(facts) else ""
    if verdict.status in GRAVE:
        return _of_a_broken_job(report, watched)
    if verdict.basis == "measured":
        return if_recorded(_of_times, report, trial_view(facts)) or "Yes: it was timed."
    if failed_early(facts):
        return "Yes: the script ended before a step was seen."
    seen = ended_rank(facts) or state_now(report)
    told = "Yes: it was read from the job itself" if seen else _side(report)
    if verdict.basis == "modelled":
        return f"{told}. {ERROR[:1].upper()}{ERROR[1:]}; {_seen(watched)}."
    if any(_is_modelled(step) for step in report.prescription):
        return f"{told}. The savings are estimates; {_seen(watched)}."
    if verdict.status == "no_fp8":
        return f"Yes, for the layers that were found; {_seen(watched)}."
    return f"{told}; {_seen(watched)}."


def _side(report: Document) -> str:
    """Say on which side of 1 the estimate is, if it is further from it than its error."""
    expects, status = estimate_told(report), report.verdict.status
    if expects is None:
        stays = any(step.treatment.name == STAY_IN_BF16 for step in report.prescription)
        wins, loses = status == "fp8_faster", status == "fp8_slower" or stays
    elif expects.as_is is not None and not expects.recipes:
        wins, loses = expects.as_is_wins, expects.as_is_loses
    elif expects.is_of_another_step:
        return "No: the step as it is has no estimate"
    else:
        wins, loses = expects.wins, expects.loses
    if wins or loses:
        return "Faster: likely" if wins else "Slower: likely"
    return "No: the estimate allows both" if expects else "No: FP8 was not compared with BF16"


def _of_a_broken_job(report: Document, watched: str) -> str:
    facts = report.facts
    ran = [each for each in facts.arms() if each.get("tried")]
    if own_step_failed(facts):
        how, nothing = "the step failed when it ran", ""
    elif any(each.get("non_finite") for each in ran):
        how, nothing = "the timed steps show it", ""
    else:
        how, nothing = "it was read from the job itself", "" if ran else f"; {_seen(watched)}"
    doubts = "; ".join(_doubts(trial_view(facts))) if ran else ""
    return f"Yes: {how}{nothing}.{f' Its times are not sure: {doubts}.' if doubts else ''}"


def _of_times(report: Document, view: TrialView) -> str:
    """Say whether the side is sure, then whether the size is, with the 90% interval of the ratio."""
    uses_fp8 = view.uses_fp8
    fp8, bf16 = (view.as_is if uses_fp8 else view.fp8), view.bf16
    if timed_on_cpu(view.facts):
        return "Not for a GPU: the steps were timed on a CPU."
    if fp8 is None or bf16 is None:
        return f"No: {'BF16' if uses_fp8 else 'FP8'} was not timed."
    speedup, doubts = ratio_on_screen(bf16, fp8), list(_doubts(view))
    turns, busy = may_turn(Pair(fp8, bf16), view.facts.trial), view.host_contention
    advice = f" On a quiet CPU the advice may change ({busy})." if busy and not turns else ""
    because = "; ".join([*doubts, *([f"the CPU was busy, {busy}"] if busy and turns else [])])
    rounds = f"in {plural(len(fp8.rounds_ms), 'round')}"
    wide = speedup.high / speedup.low >= WIDE
    because = because or ("the rounds differ by a tenth or more" if wide else "")
    end = f"{f': {because}' if because else ''}.{advice}"
    if report.verdict.status == "too_noisy" or (view.fp8_is_noise and not uses_fp8):
        return f"No: {_speed(speedup)} {rounds}{end}"
    answer, size = SIDES[side(speedup.median)], _size(speedup, view.speed.bound if view.speed else None)
    if view.may_become_even and not view.side_is_wrong:
        return f"Not {SIDES[-side(speedup.median)]}: yes. {answer.capitalize()} or equal: not sure{end}"
    if turns or view.side_is_wrong:
        return f"No, the answer may change on a quiet machine{end}"
    if not because:
        named = f"{size} {answer}" if side(speedup.median) else size
        return f"Yes: {named} {rounds} (90% interval).{advice}"
    return f"{answer.capitalize()}: yes. How much: no, {size} {rounds}{end}"


def _size(speedup: Interval, bound: float | None) -> str:
    """Write the interval as times faster or slower, no more than the upper bound allows."""
    if not side(speedup.median):
        return _speed(speedup)
    low, high = speedup.low, min(speedup.high, bound or speedup.high)
    ends = (1 / high, 1 / low) if speedup.median < 1 else (low, high)
    return " to ".join(dict.fromkeys(map(in_times, ends)))


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


def _is_modelled(step: Step) -> bool:
    saves = step.saving_ms is not None and step.saving_ms.basis == "modelled"
    return saves or step.treatment.name == STAY_IN_BF16


def _was_watched(facts: Facts) -> bool:
    return bool(facts.get("observed.steps_ms"))


def _seen(watched: str) -> str:
    return f"{watched} were timed as they ran, BF16 was not" if watched else "nothing was timed"


RESTS_ON = {"measured": "from measured kernel times", "modelled": "estimated from the datasheet"}
"""Basis of the bound -> what it was computed from."""


def limit(facts: Facts, steps: Sequence[Step]) -> str:
    """Write the upper bound; empty if unknown, or if it does not hold for the plan.

    The bound is on the step with the best BF16 as it is. A plan that makes BF16 faster too goes beyond it.
    """
    most = ceiling(facts)
    if most is None or that_help_bf16_too(step.treatment.name for step in steps):
        return ""
    planned, bf16 = arm(facts.trial, ArmName.PRESCRIBED), best_bf16(facts)
    if (
        planned
        and bf16
        and planned.step_ms
        and bf16.step_ms
        and bf16.step_ms / planned.step_ms > most.speedup
    ):
        return ""
    how = RESTS_ON.get(most.basis, most.basis)
    return f"Upper bound: {most.speedup:.2f}x BF16, if every FP8 cast were free ({how})."
