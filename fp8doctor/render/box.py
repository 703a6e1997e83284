"""The answer in short lines: is FP8 slower, why, the fix, its effect, how sure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.arms import timed_on_cpu, uses_fp8
from fp8doctor.analysis.memory_fit import fit
from fp8doctor.analysis.modelled_speedup import ModelledSpeedup
from fp8doctor.analysis.plan_end import gib_saved_at_no_cost, leaner_fp8
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.analysis.whole_step import in_bounds, timed_alone, whole_step_in_words
from fp8doctor.diagnosis.answer import GRAVE, Verdict
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import FAILED_EARLY
from fp8doctor.diagnosis.next_step import (
    how_to_time,
    more_time,
    nothing_found,
    opened,
    where_to_time,
)
from fp8doctor.diagnosis.outlook import End, outlook
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Basis, Finding, Treatment
from fp8doctor.render.causes import (
    BUSY_HOST,
    Cause,
    as_sentence,
    causes_told,
    estimate_told,
    gives_nan,
    gravest,
    modelled_loss,
    unfixed_problems,
)
from fp8doctor.render.certainty import certainty, limit
from fp8doctor.render.details import numbers
from fp8doctor.render.planned_fixes import not_timed
from fp8doctor.render.timing import labels
from fp8doctor.render.words import HOW_KNOWN, numbered
from fp8doctor.wording import in_ms, in_times

Tone = Literal["bad", "good", "plain"]


WHAT: dict[str, tuple[Tone, str]] = {
    "step_raises": ("bad", "The training step raises"),
    "layers_do_not_learn": ("bad", "Layers do not learn"),
    "fp8_not_engaged": ("bad", "FP8 does not run"),
    "fp8_slower": ("bad", "FP8 is slower than BF16"),
    "fp8_even": ("plain", "FP8 is about as fast as BF16"),
    "fp8_faster": ("good", "FP8 is faster than BF16"),
    "too_noisy": ("plain", "The timing is too noisy to tell"),
    "no_fp8": ("plain", "No FP8 training here"),
    "not_measured": ("plain", "Not timed: FP8 may be faster or slower than BF16"),
}
"""Status of the verdict -> how it looks, and what it says."""


NOT_SURELY = {"fp8_slower": "FP8 is not faster than BF16", "fp8_faster": "FP8 is not slower than BF16"}
"""Status of the verdict -> what of it holds if a quiet machine may make FP8 and BF16 even."""


SLOWER = "FP8 would be slower than BF16 (estimated)"
"""Says that the plan leaves FP8 off although no whole step was timed or estimated."""


TOO_LARGE = "It does not fit into the GPU's memory (estimated)"
"""Says that the step will not run on this GPU, in FP8 or in BF16."""


TOO_SMALL = "Too small for FP8: stay in BF16"
"""Says that a conversion would make the step slower."""


FIXED = {
    "step_raises": "the step runs",
    "layers_do_not_learn": "the layers train",
    "fp8_not_engaged": "FP8 runs",
}
"""Grave status -> what is so once its cause is fixed, before anything about speed."""


LABELS = ("Memory", "Why", "Fix", "Then", "Limit", "Sure")
"""The questions that an answer answers, in this order."""


ON_CPU = " on the CPU"
"""Stands behind a time that no GPU took."""


ASKED_FOR = "MOD001"
"""The check that tells of FP8 that was asked for."""


NEVER_FINITE = "FP8 gives NaN: the model does not learn"
"""Says that the user's own step is not finite in FP8."""


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
    tone, what = WHAT.get(verdict.status, ("plain", verdict.status.replace("_", " ")))
    why = tuple(causes_told(report, steps))
    causes = frozenset(each.code for each in why if each.code)
    error = report.facts.get("script_error")
    if error:
        tone, what = "bad", FAILED_EARLY
    elif recorded(report.facts, "network"):
        expects = estimate_told(report)
        told = NEVER_FINITE if gives_nan(report) else _headline(expects) if expects else _even(report) or what
        what = _as_sure_as_timed(report, told) or _in_short(verdict, steps, told)
    else:
        what = "No model was examined"
    if (verdict.basis == "measured" and timed_alone(report.facts)) or _is_estimated_alone(report):
        what = re.sub(r"\bFP8 (is|would)\b", r"FP8 compute \1", what, count=1)
        tone, what = _with_whole_step(verdict, tone, what)
    memory = if_recorded(fit, report.facts) if recorded(report.facts, "network") else None
    fix = [] if memory and memory.is_too_large and not steps else [*_fix(report, steps)]
    if memory and memory.is_too_large:
        fix.insert(0, memory.fix)
        if verdict.status not in GRAVE and not error:
            tone, what = "bad", TOO_LARGE
    if what == WHAT["not_measured"][1] and (found := _by_severity(report)) and found[0].severity == "error":
        tone, what = "bad", found[0].title
        others = [Cause(each.title, each.code) for each in found[1:2]]
        why = tuple(each for each in why if each.code != found[0].code) or (*others,)
        causes |= {each.code for each in found[:2]}
    return Answer(
        tone="bad" if report.worst() == "error" else tone,  # the exit code is 1
        what=what,
        numbers=error or if_recorded(_numbers, report) or _no_model(report),
        why=tuple(each.sentence for each in why),
        causes=causes,
        memory=memory.sentence if memory and memory.may_be_too_large else "",
        fix=tuple(fix),
        then=_then(report, steps),
        limit=" ".join(filter(None, (_whole(report), if_recorded(limit, report.facts, steps)))),
        sure=" ".join(filter(None, [certainty(report), _untimed(report.facts, why)])),
    )


def _by_severity(report: Document) -> list[Finding]:
    """List errors, then warnings."""
    found = [each for each in report.findings if each.severity in ("error", "warning")]
    return sorted(found, key=lambda each: each.severity != "error")


def _untimed(facts: Facts, why: Sequence[Cause]) -> str:
    """Say why a trial timed no copy at all, unless the cause says it already."""
    reason = facts.get("trial.reason")
    if facts.get("trial.arms", True) or reason is None or any(each.is_summary for each in why):
        return ""
    return f"The trial could not time copies of it: {reason.rstrip('.')}."


def _even(report: Document) -> str:
    """Say what memory FP8 saves if it is measured to be as fast as BF16; else empty."""
    speed = trial_view(report.facts).speed
    if report.verdict.status != "fp8_even" or speed is None:
        return ""
    saved = if_recorded(gib_saved_at_no_cost, speed.bf16, speed.as_is, report.facts.trial)
    return f"No difference in speed; FP8 saves {saved:.1f} GiB" if saved else ""


def _whole(report: Document) -> str:
    """Estimate the whole step of a job whose compute alone was timed; else empty."""
    verdict = report.verdict
    if _is_estimated_alone(report):
        return "Estimated without communication."
    if verdict.basis != "measured":
        return ""
    return whole_step_in_words(
        report.facts, verdict.speedup, verdict.achievable_speedup, verdict.bf16_step_ms
    )


def _with_whole_step(verdict: Verdict, tone: Tone, what: str) -> tuple[Tone, str]:
    """Add the whole step to a title about compute, and its tone unless it is as fast for sure."""
    low, high = verdict.whole_step_low or 0.0, verdict.whole_step_high
    if high is None:
        return tone, what
    if tone == "good" and low < 1:
        tone = "bad" if high < 1 else "plain"
    return tone, f"{what}; the whole step {in_bounds(low, high)}".removesuffix(" the speed of BF16")


def _is_estimated_alone(report: Document) -> bool:
    """Return whether the answer is an estimate of a rank's compute, in a job of several."""
    distributed = report.facts.get("training.distributed")
    several = distributed is not None and distributed.get("world_size", 1) > 1
    return several and estimate_told(report) is not None


def _as_sure_as_timed(report: Document, what: str) -> str:
    """Leave out what the timing does not decide: the size, or whether FP8 is even; else empty."""
    view = trial_view(report.facts)
    if view.may_become_even:
        return NOT_SURELY.get(report.verdict.status, what)
    return what if view.size_is_wrong else ""


def _in_short(verdict: Verdict, steps: Sequence[Step], what: str) -> str:
    """Say how many times slower or faster FP8 is, or that the plan leaves it off untimed."""
    stays = any(step.treatment.name == STAY_IN_BF16 for step in steps)
    if verdict.status == "not_measured" and verdict.basis is None and stays:
        return SLOWER
    if verdict.basis == "modelled" and verdict.status in ("fp8_slower", "fp8_even", "fp8_faster"):
        return f"{what} (estimated)"
    if verdict.status == "no_fp8" and verdict.basis == "measured" and verdict.achievable_speedup:
        return _as_timed(verdict.achievable_speedup)
    if verdict.status == "fp8_slower" and verdict.speedup and verdict.speedup < 1:
        return f"FP8 is {in_times(1 / verdict.speedup)} slower than BF16"
    if verdict.status == "fp8_faster" and verdict.speedup and verdict.speedup > 1:
        return f"FP8 is {in_times(verdict.speedup)} faster than BF16"
    return what


def _as_timed(speedup: float) -> str:
    """Say what the fastest FP8 that was timed gives a model without FP8."""
    if abs(speedup - 1) < EVEN:
        return "FP8 would be about as fast as BF16"
    how = "faster" if speedup > 1 else "slower"
    return f"FP8 would be {in_times(max(speedup, 1 / speedup))} {how} than BF16"


def _no_model(report: Document) -> str:
    """Say why no model was examined, if the answer is about the environment alone."""
    facts = report.facts
    if recorded(facts, "network") or not report.findings:
        return ""
    return str(facts.get("gaps", {}).get("network", "")).rstrip(".")


def _numbers(report: Document) -> str:
    """Write both times and their basis, else the times that the cost model expects."""
    verdict = report.verdict
    if expects := estimate_told(report):
        return _estimate(expects)
    if not verdict.step_ms:
        return ""
    where = ON_CPU if timed_on_cpu(report.facts) else ""
    if not verdict.bf16_step_ms or verdict.status == "no_fp8":
        now = " as you run it" if verdict.basis == "measured" and verdict.achievable_speedup else ""
        return f"{verdict.step_ms:,.1f} ms/step{now}, {verdict.basis or 'as it ran'}{where}"
    if verdict.status in GRAVE:
        best = f"best BF16 {verdict.bf16_step_ms:,.1f}"
        return f"{verdict.step_ms:,.1f} ms/step as you run it, {best}, measured{where}"
    if verdict.basis == "modelled":
        best = f"{verdict.bf16_step_ms:,.1f}, estimated"
        return f"{verdict.step_ms:,.1f} ms/step, measured{where}, vs {best}"
    return f"{verdict.step_ms:,.1f} vs {verdict.bf16_step_ms:,.1f} ms/step, {verdict.basis}{where}"


def _headline(expects: ModelledSpeedup) -> str:
    """Say whether FP8 is faster, or would be, as far as the model's error allows."""
    if expects.recipes:
        if expects.wins:
            return f"FP8 would be about {in_times(expects.best)} faster than BF16"
        return TOO_SMALL if expects.loses else "Too close to tell whether FP8 would be faster"
    if expects.as_is is None:
        if expects.wins:
            return f"FP8 would be about {in_times(expects.best)} faster than BF16 {expects.after}"
        if expects.loses:
            return f"FP8 would be about {in_times(1 / expects.best)} slower than BF16 {expects.after}"
        return f"Too close to tell whether FP8 would be faster {expects.after}"
    if expects.as_is_loses:
        return f"FP8 is about {in_times(1 / expects.as_is)} slower than BF16"
    if expects.as_is_wins:
        return f"FP8 is about {in_times(expects.as_is)} faster than BF16"
    return "Too close to tell whether FP8 is faster than BF16"


def _estimate(expects: ModelledSpeedup) -> str:
    """Write the estimate beside the headline, whose number it does not repeat."""
    if expects.wins and (expects.as_is is None or expects.recipes or not expects.gains_compiled):
        return f"estimated for {expects.gpu} ({expects.range})"
    now = f"estimated {expects.as_is or expects.best:.2f}x for {expects.gpu}"
    later = f"; compiled {expects.best:.2f}x" if expects.as_is and expects.gains_compiled else ""
    return f"{now}{later} ({expects.range})"


def _fix(report: Document, steps: Sequence[Step]) -> Iterator[str]:
    """Tell what to do, each step by its number."""
    if steps:
        for number, step in enumerate(steps, 1):
            untimed = f" ({why})" if (why := if_recorded(not_timed, step, report.facts)) else ""
            summary = as_sentence(f"{step.treatment.summary.rstrip('.')}{untimed}")
            yield f"{number}. {summary}" if len(steps) > 1 else summary
        yield from opened(report)
        return
    told = {each.code for each in report.findings}
    unfixed = list(unfixed_problems(report))
    faster = report.verdict.status == "fp8_faster"
    grave = gravest(report) or (None if faster else next(iter(unfixed), None))
    more = more_time(report.facts)
    if more and report.verdict.status == "fp8_slower":
        yield f"Leave FP8 off, or time more variants: {more}"
    elif grave:
        yield f"{_hidden(report) or 'No fix is known.'} See: fp8doctor explain {grave.code}"
    elif report.verdict.status == "step_raises" or recorded(report.facts, "script_error"):
        yield "Fix the exception, then run fp8doctor again."
    elif report.verdict.status == "fp8_slower":
        yield "Leave FP8 off until the cause is known."
    elif report.verdict.status == "too_noisy":
        yield f"Time again{' when the host is quiet' if BUSY_HOST in told else ' on an idle GPU'}."
    elif report.verdict.status == "not_measured" and not recorded(report.facts, "network"):
        yield "Run fp8doctor on a model."
    elif modelled_loss(report):
        how = how_to_time(report)
        timed = f", or time it {where_to_time(report.facts)}: {how}" if how else ""
        off = "Leave FP8 off" if if_recorded(uses_fp8, report.facts) else "Stay in BF16"
        yield f"{off}{timed or '.'}"
    elif later := _look_later(report):
        yield as_sentence(later.summary)
    else:
        nothing = "Nothing to change for speed." if unfixed else "Nothing to change."
        yield nothing_found(report, _hidden(report) or nothing)
        return
    yield from opened(report)


def _hidden(report: Document) -> str:
    """Say that noise hides whether a variant that was timed is faster; empty without one."""
    end = trial_view(report.facts).end
    if end is None or end.hidden is None:
        return ""
    named = labels(report.facts, numbers(report.prescription))[end.hidden.name]
    return f"No fix is faster for sure: {named} took {in_ms(end.hidden.step_ms)}, within the noise."


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
    return f"With {which if len(steps) > 1 else 'this fix'} {FIXED[status]}. "


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
    if end.sentence:
        both = f"{mended}{end.sentence}".replace(". With this fix: ", ": ", 1)
        told = f"{_untried(report, steps)}{end.sentence} {_finite(report)}" if gives_nan(report) else both
        return End(f"{told} {_leaner(report, steps)}".rstrip(), end.basis)
    if verdict.status == "no_fp8" and estimate_told(report):
        return End("The step stays as it is; FP8 was not timed.")  # the title has the estimate
    if verdict.status == "no_fp8" and verdict.achievable_speedup:
        how: Basis = "measured" if verdict.basis == "measured" else "modelled"
        speed = f"{verdict.achievable_speedup:.2f}x"
        here = how == "measured" and timed_on_cpu(report.facts)
        where = f"{ON_CPU}, which does not predict a GPU" if here else ""
        return End(f"FP8 would run at {speed} the speed of the best BF16, {HOW_KNOWN[how]}{where}.", how)
    if verdict.status == "no_fp8":
        what = "FP8" if verdict.basis == "measured" else "the step"
        return End(f"The gain from FP8 is unknown: {what} was not timed.")
    if not recorded(report.facts, "network"):
        return End("Unknown: no model was examined.")
    return End("Its speed was not measured.")


def _leaner(report: Document, steps: Sequence[Step]) -> str:
    """Name an FP8 variant that is as fast as the BF16 of the plan, and takes less memory."""
    found = if_recorded(leaner_fp8, report.facts)
    if found is None:
        return ""
    named = labels(report.facts, numbers(steps))[found[0].name]
    return f"{named}: no difference in speed ({in_ms(found[0].step_ms)}), {found[1]:.1f} GiB less."


def _untried(report: Document, steps: Sequence[Step]) -> str:
    """Say which fixes of the NaN are not in the timed step that the plan ends in."""
    end = trial_view(report.facts).end
    missing = {name: n for name, n in _fixing(report, steps).items() if end and name not in end.changes}
    if not missing or len(steps) == 1 or (end and end.in_bf16):
        return ""
    return f"With {numbered([*missing], missing)} the NaN should go (not tried). "


def _finite(report: Document) -> str:
    """Say whether the step that the plan ends in was seen to be finite."""
    end = trial_view(report.facts).end
    seen = end is not None and end.arm.get("non_finite") == ()
    return "Its loss and gradients were finite." if seen else "Check that the loss stays finite."
