"""The answer in short lines: is FP8 slower, why, the fix, its effect, how sure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from fp8doctor.analysis.arms import timed_on_cpu, uses_fp8
from fp8doctor.analysis.memory_fit import fit
from fp8doctor.analysis.outcome import MAY_BE_EVEN
from fp8doctor.analysis.plan_end import leaner_fp8
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.analysis.waiting import script_overhead, waiting_first
from fp8doctor.analysis.whole_step import in_bounds, whole_step, whole_step_in_words
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import failed_early, has_no_fp8
from fp8doctor.diagnosis.next_step import (
    how_to_time,
    nothing_found,
    opened,
    run_again,
    timed,
    where_to_time,
    with_more_time,
)
from fp8doctor.diagnosis.outlook import WITH_THIS_FIX, End, once_applied, outlook
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Basis, Treatment
from fp8doctor.render.causes import (
    BUSY_HOST,
    Cause,
    as_sentence,
    causes_told,
    gravest,
    keeps_fp8,
    state_now,
    unfixed_problems,
)
from fp8doctor.render.certainty import certainty, limit
from fp8doctor.render.details import numbers
from fp8doctor.render.ended_ranks import ended_rank, how_to_go_on
from fp8doctor.render.headline import (
    ON_CPU,
    TOO_LARGE,
    Tone,
    headline,
    is_estimated_alone,
    numbers_told,
)
from fp8doctor.render.planned_fixes import not_timed
from fp8doctor.render.step_parts import estimate_told, modelled_loss
from fp8doctor.render.timing import labels
from fp8doctor.render.words import HOW_KNOWN, numbered
from fp8doctor.wording import in_ms

FIXED = {
    "step_raises": "the step runs",
    "layers_do_not_learn": "the layers train",
    "not_finite": "the loss stays finite",
    "fp8_not_engaged": "FP8 runs",
}
"""Grave status -> what is so once its cause is fixed, before anything about speed."""


LABELS = ("Memory", "Why", "Fix", "Then", "Limit", "Sure")
"""The questions that an answer answers, in this order."""


ASKED_FOR = "MOD001"
"""The check that tells of FP8 that was asked for."""


COMMAND = r"fp8doctor [\w-]+|--budget|inspect_model"
"""What a reader can type."""


class Answer(Struct, frozen=True):
    """The answer; what is not known is empty."""

    tone: Tone
    what: str
    numbers: str
    why: tuple[str, ...]
    causes: frozenset[str]
    """Codes of the findings that ``why`` tells."""
    memory: str
    """Says that the job does not fit, or may not."""
    fix: tuple[str, ...]
    then: End
    """The time of a step with the fix."""
    limit: str
    sure: str
    """The basis of the answer, and how far to trust it."""

    @property
    def rows(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Label each question's sentences; leave out questions without an answer."""
        told = ((self.memory,), self.why, self.fix, (self.then.sentence,), (self.limit,), (self.sure,))
        for label, sentences in zip(LABELS, told, strict=True):
            if known := tuple(filter(None, sentences)):
                yield label, known


def answer(report: Document, steps: Sequence[Step] | None = None) -> Answer:
    """Write the answer of a report; the whole of it is in the summary of the verdict.

    ``steps`` are those of the plan that are shown, all of them if none are given.
    """
    verdict = report.verdict
    steps = report.prescription if steps is None else steps
    tone, what = headline(report, steps)
    why = tuple(causes_told(report, steps))
    error = report.facts.get("script_error")
    memory = if_recorded(fit, report.facts) if recorded(report.facts, "network") else None
    fix = [] if memory and memory.is_too_large and not steps else [*_fix(report, steps)]
    if memory and memory.is_too_large:
        fix.insert(0, memory.fix)
        if verdict.status not in GRAVE and not error:
            tone, what = "bad", TOO_LARGE
    state, then = state_now(report), _then(report, steps)
    if memory and memory.is_too_large:
        then = End(f"Once it fits: {then.sentence}", then.basis)
    sure = [_of_whole(report), certainty(report), _of_compute(report), _untimed(report.facts, why)]
    fix += filter(None, [_how_to_find_the_whole(report)])
    told = " ".join((what, *fix, then.sentence, *sure))
    return Answer(
        tone="bad" if report.worst() == "error" else tone,  # the exit code is 1
        what=what,
        numbers=error or if_recorded(numbers_told, report) or _no_model(report),
        why=tuple(each.sentence for each in why),
        causes=frozenset(each.code for each in (*why, *([state] if state else ())) if each.code),
        memory=memory.sentence if memory and memory.may_be_too_large else "",
        fix=tuple(filter(None, fix)),
        then=then,
        limit=" ".join(
            filter(
                None,
                (
                    if_recorded(waiting_first, report.facts),
                    _whole(report),
                    None if verdict.whole_step_high else if_recorded(limit, report.facts, steps),
                ),
            )
        ),
        sure=" ".join(filter(None, [*sure, _how_to_be_sure(report, steps, told)])),
    )


def _how_to_be_sure(report: Document, steps: Sequence[Step], told: str) -> str:
    """Write the command that settles what is open, unless ``told`` has one or none can help."""
    facts = report.facts
    if not recorded(facts, "network") or re.search(COMMAND, told):
        return ""
    if (MAY_BE_EVEN in told or "advice may change" in told) and (again := timed(facts)):
        return f"Time it again on a quiet machine: {again}"
    if "nothing was timed" not in told:
        return ""
    if TOO_LARGE in told:
        return "Time it once it fits: torchrun ... -m fp8doctor run --stop SCRIPT ARGS..."
    how = run_again(facts) or "call inspect_model."
    stays = any(step.treatment.name == STAY_IN_BF16 for step in steps)
    return f"{once_applied(steps)}{how}" if steps and not stays else f"Time it {where_to_time(facts)}: {how}"


def _untimed(facts: Facts, why: Sequence[Cause]) -> str:
    """Say why a trial timed no copy at all, unless the cause says it already."""
    reason = facts.get("trial.reason")
    if facts.get("trial.arms", True) or reason is None or any(each.is_summary for each in why):
        return ""
    return f"The trial could not time copies of it: {reason.rstrip('.')}."


def _of_compute(report: Document) -> str:
    """Say that only compute was timed, unless it was said before."""
    told = report.verdict.whole_step_high is None or report.verdict.basis != "measured" or _is_open(report)
    return "" if told else "That is of compute; the whole step is an estimate."


def _how_to_find_the_whole(report: Document) -> str:
    """Write the command that finds the whole step, if that may be on either side."""
    if not _is_open(report):
        return ""
    how = run_again(report.facts)
    other = "BF16" if if_recorded(uses_fp8, report.facts) else "FP8"
    return f"To find the whole step, run the script in {other} too, and compare: {how}" if how else ""


def _of_whole(report: Document) -> str:
    """Say first that the whole step is not sure, if only its compute is."""
    if not _is_open(report):
        return ""
    verdict = report.verdict
    span = in_bounds(verdict.whole_step_low or 0.0, verdict.whole_step_high or 0.0)
    return f"Not of the whole step: {span} (estimated). Compute alone:"


def _is_open(report: Document) -> bool:
    """Return whether the whole step may be faster and slower, where compute was timed alone."""
    verdict = report.verdict
    high = verdict.whole_step_high
    return high is not None and verdict.basis == "measured" and (verdict.whole_step_low or 0.0) < 1 < high


def _own_step(report: Document) -> str:
    """Say that the script's own step is longer than its copy; else empty."""
    told, step = if_recorded(script_overhead, report.facts) or "", if_recorded(whole_step, report.facts)
    rest = f"other {in_ms(step.on_top_ms)}" if step else "rest"
    return f"{told.partition(':')[0]}. FP8 matmuls do not shorten the {rest}." if told else ""


def _whole(report: Document) -> str:
    """Estimate the whole step of a job whose compute alone was timed; else empty."""
    verdict = report.verdict
    if is_estimated_alone(report):
        return "Estimated without communication."
    if verdict.basis != "measured":
        return ""
    of_compute = (verdict.speedup, verdict.achievable_speedup, verdict.bf16_step_ms)
    return " ".join(filter(None, [whole_step_in_words(report.facts, *of_compute), _own_step(report)]))


def _no_model(report: Document) -> str:
    """Say why no model was examined, if the answer is about the environment alone."""
    facts = report.facts
    if recorded(facts, "network") or not report.findings:
        return ""
    return str(facts.get("gaps", {}).get("network", "")).rstrip(".")


def _fix(report: Document, steps: Sequence[Step]) -> Iterator[str]:
    """Tell what to do, each step by its number."""
    if ended_rank(report.facts):
        yield how_to_go_on(report.facts)
        if not steps:
            return
    if steps:
        for number, step in enumerate(steps, 1):
            untimed = f" ({why})" if (why := if_recorded(not_timed, step, report.facts)) else ""
            summary = as_sentence(f"{step.treatment.summary.rstrip('.')}{untimed}")
            yield f"{number}. {summary}" if len(steps) > 1 else summary
        yield keeps_fp8(report, steps)
        yield from opened(report)
        return
    told = {each.code for each in report.findings}
    unfixed = list(unfixed_problems(report))
    faster = report.verdict.status == "fp8_faster"
    grave = gravest(report) or (None if faster else next(iter(unfixed), None))
    more = with_more_time(report.facts)
    if more and report.verdict.status == "fp8_slower":
        yield f"Leave FP8 off, or time more variants: {more}"
    elif grave:
        yield _hidden(report) or f"No fix is known. See: fp8doctor explain {grave.code}"
    elif report.verdict.status == "step_raises" or failed_early(report.facts):
        shown = report.facts.get("script_error") or report.verdict.status == "step_raises"
        yield f"Fix the exception{'' if shown else ' that the script printed'}, then run fp8doctor again."
    elif report.verdict.status == "fp8_slower":
        yield "Leave FP8 off until the cause is known."
    elif report.verdict.status == "too_noisy":
        again = f"Time again {'when the host is quiet' if BUSY_HOST in told else 'on an idle GPU'}"
        yield f"{again}: {command}" if (command := timed(report.facts)) else f"{again}."
    elif report.verdict.status == "not_measured" and not recorded(report.facts, "network"):
        yield "Run fp8doctor on a model."
    elif has_no_fp8(report.verdict, report.facts):
        yield "Stay in BF16."
    elif modelled_loss(report):
        how = how_to_time(report)
        or_time = f", or time it {where_to_time(report.facts)}: {how}" if how else ""
        off = "Leave FP8 off" if if_recorded(uses_fp8, report.facts) else "Stay in BF16"
        yield f"{off}{or_time or '.'}"
    elif later := _look_later(report):
        yield as_sentence(later.summary)
    else:
        what = " in compute" if _is_open(report) else " for speed" if unfixed else ""
        nothing = f"Nothing to change{what}."
        yield nothing_found(report, _hidden(report) or nothing)
        return
    yield from opened(report)


def _hidden(report: Document) -> str:
    """Say that noise hides whether a variant that was timed is faster; empty without one."""
    end = trial_view(report.facts).end
    if end is None or end.hidden is None:
        return ""
    named = labels(report.facts, numbers(report.prescription))[end.hidden.name]
    command = "" if _is_open(report) else timed(report.facts)
    how = f" Time it again: {command}" if command else ""
    return f"No fix is surely faster: {named} took {in_ms(end.hidden.step_ms)}, within the noise.{how}"


def _look_later(report: Document) -> Treatment | None:
    """Find what to do where FP8 was asked for and the model has none yet."""
    asked = (each for each in report.findings if each.code == ASKED_FOR and each.severity == "info")
    return next((each.treatment for each in asked if report.verdict.status == "no_fp8"), None)


def _mended(report: Document, steps: Sequence[Step]) -> str:
    """Say which fixes end what is worse than speed, and how; FP8 that is left off does not run."""
    status, fixing = report.verdict.status, _fixing(report, steps)
    if not fixing:
        return ""
    which = numbered([*fixing], fixing)
    return f"{f'With {which}' if len(steps) > 1 else WITH_THIS_FIX} {FIXED[status]}"


def _fixing(report: Document, steps: Sequence[Step]) -> dict[str, int]:
    """Map the treatments that end what is worse than speed to their numbers."""
    grave, status = gravest(report), report.verdict.status
    if status not in GRAVE or grave is None:
        return {}
    return {
        step.treatment.name: number
        for number, step in enumerate(steps, 1)
        if grave.code in step.mends and (status != "fp8_not_engaged" or step.treatment.name != STAY_IN_BF16)
    }


def _then(report: Document, steps: Sequence[Step]) -> End:
    """Tell where that ends; small steps that are folded change nothing."""
    verdict = report.verdict
    mended, end = _mended(report, steps), outlook(report, steps)
    if end.sentence and verdict.basis == "measured" and verdict.whole_step_high:
        told = f"{mended}. {end.sentence}" if mended else end.sentence
        return End(f"Compute alone, on copies. {told} {_leaner(report, steps)}".rstrip(), end.basis)
    if end.sentence:
        told = end.sentence
        if verdict.status == "not_finite":
            told = f"{told} {_finite(report)}{_untried(report, steps)}"
        elif mended:
            told = f"{mended}: {end.told}" if end.begins == WITH_THIS_FIX else f"{mended}. {told}"
        return End(f"{told} {_leaner(report, steps)}".rstrip(), end.basis)
    if verdict.status == "no_fp8" and estimate_told(report):
        return End("The step stays as it is; FP8 was not timed.")  # the title has the estimate
    if verdict.status == "no_fp8" and verdict.achievable_speedup:
        how: Basis = "measured" if verdict.basis == "measured" else "modelled"
        speed = f"{verdict.achievable_speedup:.2f}x"
        here = how == "measured" and timed_on_cpu(report.facts)
        where = f"{ON_CPU}, which does not predict a GPU" if here else ""
        return End(f"FP8 would run at {speed} the speed of the best BF16, {HOW_KNOWN[how]}{where}.", how)
    if has_no_fp8(report.verdict, report.facts):
        return End("The step stays as it is.")
    if verdict.status == "no_fp8":
        return End("The gain from FP8 is unknown: FP8 was not timed.")
    if not recorded(report.facts, "network"):
        return End("Unknown: no model was examined.")
    return End("Its speed was not measured.")


def _leaner(report: Document, steps: Sequence[Step]) -> str:
    """Name an FP8 variant that is as fast as the BF16 of the plan, and takes less memory."""
    found = if_recorded(leaner_fp8, report.facts)
    if found is None or trial_view(report.facts).gives_up_fp8:  # whose fix says it
        return ""
    named = labels(report.facts, numbers(steps))[found[0].name]
    return f"{named}: no difference in speed ({in_ms(found[0].step_ms)}), {found[1]:.1f} GiB less."


def _untried(report: Document, steps: Sequence[Step]) -> str:
    """Say which fixes of the NaN are not in the timed step that the plan ends in."""
    end = trial_view(report.facts).end
    missing = {name: n for name, n in _fixing(report, steps).items() if end and name not in end.changes}
    if not missing or len(steps) == 1 or (end and end.in_bf16):
        return ""
    return f" Do {numbered([*missing], missing)} too: it removes the cause, and was not timed."


def _finite(report: Document) -> str:
    """Say whether the step that the plan ends in was seen to be finite."""
    end = trial_view(report.facts).end
    seen = end is not None and end.arm.get("non_finite") == ()
    return "Loss and gradients were finite in its steps." if seen else "Check that the loss stays finite."
