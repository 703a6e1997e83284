"""Why FP8 is slower, or what the plan fixes, in sentences: the largest measured cost first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import Struct

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.modelled_speedup import ModelledSpeedup
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import Waterfall
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, traits
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.expected_verdict import (
    failed_early,
    invalidates,
    short_of_training,
)
from fp8doctor.diagnosis.giving_up import COMPILATION, stays_in_bf16
from fp8doctor.diagnosis.next_step import run_again
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.finding import Finding, Saving
from fp8doctor.known_errors import in_a_sentence
from fp8doctor.render.details import CASTS_COST, IDLE, fix_in_words, gained_alone, gains_nothing, numbers
from fp8doctor.render.ended_ranks import ended_rank, why_it_ended
from fp8doctor.render.step_parts import (
    estimate_told,
    estimated_parts,
    measured_parts,
    no_cause_known,
    only_bf16_is_compiled,
    summary_of_recipes,
)
from fp8doctor.render.timing import as_is_difference, labels, timing
from fp8doctor.wording import percent

MOST_CAUSES = 2
"""Causes that are named next to what they cost."""


NON_FINITE = "NUM001"
"""The check that tells of NaN and infinity in FP8 alone."""


BUSY_HOST = "STP009"


UNKNOWN_CAUSE = "STP006"
"""The check that tells of a gap that no other explains."""


DISTURBED = (BUSY_HOST, "GPU004")
"""Checks whose findings are about the machine while it timed, not about the job."""


RECOMPUTE, MORE_MEMORY = "CKP003", "MEM001"
"""Checks whose findings are of what FP8 costs more than BF16, for checkpointing and in memory."""


COMPILES_LONG = "CMP006"
"""The check whose finding is of seconds before the step, which are no cause of its time."""


def state_now(report: Document) -> Finding | None:
    """Find what a job without times is in the first place: an error, or not the step that was modelled.

    None if the status of the verdict says it.
    """
    verdict, facts = report.verdict, report.facts
    told = verdict.status in GRAVE or verdict.basis == "measured" or verdict.step_ms
    if told or facts.get("script_error") or not recorded(facts, "network"):
        return None
    if error := next((each for each in report.findings if each.severity == "error"), None):
        return error
    expects = estimate_told(report)
    without = verdict.status == "no_fp8" and bool(if_recorded(short_of_training, facts))
    unknown = expects.is_of_another_step if expects else verdict.status == "not_measured"
    if not (without or unknown):
        return None
    planned = {step.code for step in report.prescription}
    heads = [each for each in report.findings if each.code in planned]
    return next(filter(invalidates, heads), next(iter(heads), None) if expects else None)


def as_is_ms(report: Document, expects: ModelledSpeedup) -> tuple[float, float] | None:
    """Estimate the step as it is, low and high: the modelled one with what the fix of the title saves."""
    saved = state.saving_ms if (state := state_now(report)) else None
    if saved is None or saved.low <= 0 or expects.parts is None:
        return None
    return expects.parts.fp8_ms + saved.low, expects.parts.fp8_ms + saved.high


def times_slower(report: Document, expects: ModelledSpeedup) -> tuple[float, float] | None:
    """Bound how many times slower than BF16 the step as it is runs; None if it may be as fast."""
    if expects.as_is is not None and expects.as_is_loses:
        return (1 / expects.as_is,) * 2
    bf16_ms, now = expects.parts.bf16_ms if expects.parts else 0.0, as_is_ms(report, expects)
    return (now[0] / bf16_ms, now[1] / bf16_ms) if now and now[0] > bf16_ms > 0 else None


class Cause(Struct, frozen=True):
    sentence: str
    code: str = ""
    """Of the finding that it is the title of."""
    ms: float = 0.0
    """Its measured cost per step; 0 if it was not measured."""
    is_summary: bool = False
    """True if it is the verdict's summary."""
    is_part_of_gap: bool = False
    """True if its cost is a part of what FP8 takes longer."""


def causes_told(report: Document, steps: Sequence[Step]) -> Iterator[Cause]:
    """Tell the causes, the one with the largest measured cost first.

    If FP8 is not slower, they are of what the plan fixes and stand behind its casts and matmuls.
    """
    verdict = report.verdict
    if error := report.facts.get("script_error"):
        known = in_a_sentence(error)
        yield Cause(known or "fp8doctor saw no training step, and read only the environment.")
        yield from _causes(report, steps, [])
        return
    if failed_early(report.facts):
        yield from _causes(report, steps, [])
        yield Cause("The exception is in the script's output; fp8doctor recorded none.", is_summary=True)
        return
    if ended_rank(report.facts):
        yield from map(Cause, why_it_ended(report.facts))
        yield from _why_slow(report)
        return
    grave = gravest(report)
    if verdict.status in GRAVE and grave:
        yield _cause_from(grave)
        if where := verdict.status == "not_finite" and report.facts.get("not_finite.where"):
            yield Cause(where)
        if verdict.status in ("layers_do_not_learn", "not_finite"):
            yield from _why_slow(report)
        elif stays_in_bf16(steps) and (parts := estimated_parts(report)):
            yield Cause(parts)
        return
    if verdict.status == "step_raises":
        yield Cause(verdict.summary, is_summary=True)
        return
    if state := state_now(report):
        others = [each for each in _causes(report, steps, [Cause("", state.code)]) if each.code != state.code]
        yield from map(Cause, filter(None, (as_sentence(_reason(state)), estimated_parts(report))))
        yield from others
        return
    difference = if_recorded(as_is_difference, report.facts)
    of_fp8 = verdict.basis == "measured" and verdict.status != "no_fp8"
    costs = [divided(difference, report)] if difference and of_fp8 else []
    causes = _causes(report, steps, costs)
    costs = [_with_compilation(each, causes, report) for each in costs]
    slower = verdict.status == "fp8_slower"
    if slower or verdict.basis != "measured":
        least = max((each.ms for each in costs), default=0.0)
        told = sorted((*causes, *costs), key=lambda each: _weight(each, least), reverse=True)
        estimated = estimated_parts(report) if told and verdict.basis != "measured" else ""
        if estimated:
            yield Cause(estimated)
        yield from told or _without_a_cause(report)
    else:
        yield from (*(costs or _without_a_cause(report)), *causes)


def _weight(cause: Cause, least: float) -> tuple[bool, bool, bool, float]:
    """Put what FP8 alone costs first, from the largest part of the difference on; then what costs most."""
    leads = cause.is_part_of_gap and cause.ms > least
    return cause.code == NON_FINITE, leads, cause.code == CASTS_COST, cause.ms


def _why_slow(report: Document) -> Iterator[Cause]:
    """Tell why a job with a fault is slow too: its parts if FP8 is slower, and the costliest finding."""
    apart = if_recorded(as_is_difference, report.facts)
    if apart and apart.difference_ms < EVEN * apart.step_ms:
        return
    causes = [*_costliest(report.findings, report)]
    if apart:
        yield _with_compilation(divided(apart, report), causes, report)
    elif told := estimated_parts(report):
        yield Cause(told)
    yield from causes


def _with_compilation(cause: Cause, others: Sequence[Cause], report: Document) -> Cause:
    """Say that the best BF16 alone is compiled, unless another cause does."""
    if not only_bf16_is_compiled(report) or any(each.code.startswith("CMP") for each in others):
        return cause
    told = f"{cause.sentence} FP8 is not compiled, the best BF16 is."
    return msgspec.structs.replace(cause, sentence=told)


def _costliest(findings: Iterable[Finding], report: Document) -> Iterator[Cause]:
    """Write the finding whose fix saves most of FP8's time, if any is known."""
    saves = [
        (each.saving_ms.middle, each)
        for each in findings
        if each.severity != "info"
        and each.code not in DISTURBED
        and each.saving_ms
        and each.saving_ms.low > 0
    ]
    if saves:
        most = max(saves, key=lambda each: each[0])[1]
        yield _cause_from(most, most.saving_ms, report)


def keeps_fp8(report: Document, steps: Sequence[Step]) -> str:
    """Tell how to train in FP8 all the same, if the plan ends an error by leaving FP8 off."""
    error = gravest(report) if report.verdict.status in GRAVE else state_now(report)
    planned = {step.treatment.name for step in steps}
    if STAY_IN_BF16 not in planned or not error or not error.treatment or error.treatment.name in planned:
        return ""
    return f"For FP8 instead: {error.treatment.summary}."


def _reason(finding: Finding) -> str:
    """Choose the first sentence of an explanation that its title does not say."""
    sentences = finding.explanation.split(". ")
    return next((each for each in sentences if each.rstrip(".") not in finding.title), sentences[0])


def _causes(report: Document, steps: Sequence[Step], beside: Sequence[Cause]) -> list[Cause]:
    """List causes that the plan fixes, before them one that is measured to cost more than all others.

    Without any, the first problem without a step. Causes that the caller gives are left out. Errors first.
    """
    told = {each.code for each in beside}
    planned = [each for each in steps if each.code and each.code != COMPILES_LONG]
    proven = [each for each in report.findings if each.severity != "info" and gained_alone(each)]
    alone = {each.treatment.name: each.saving_ms for each in reversed(proven) if each.treatment}
    causes = [
        _cause_from(each, each.saving_ms or alone.get(each.treatment.name), report)
        for each in sorted(planned, key=lambda each: each.code != NON_FINITE)
        if each.code not in told
    ]
    if report.verdict.basis == "measured":
        found = (each for each in _not_compiled(report) if each.code not in told and each not in proven)
        causes = [*map(_cause_from, found), *causes]
    timed = (_cause_from(each, each.saving_ms, report) for each in proven if each.code not in told)
    most = max(timed, key=lambda each: each.ms, default=None)
    if most and most.ms and all(most.ms > each.ms for each in (*beside, *causes)):
        causes = [most, *causes]
    if idle := _idle_time(report):
        causes = [idle, *(each for each in causes if each.code != IDLE)]
    stays = next((each for each in planned if each.treatment.name == STAY_IN_BF16), None)
    of_fp8 = (each for each in report.findings if stays and each.code in stays.mends[1:])
    slower, faster = (report.verdict.status == f"fp8_{how}" for how in ("slower", "faster"))
    recompute = (each for each in report.findings if slower and each.code == RECOMPUTE)
    causes += [*map(_cause_from, recompute), *_costliest(of_fp8, report)]
    others = (each for each in unfixed_problems(report) if not planned and each.code not in told)
    unfixed = [_unfixed(each, report) for each in others if not faster or each.code == MORE_MEMORY]
    shown = causes[:MOST_CAUSES] or unfixed[:1]
    codes = told.union(each.code for each in shown)
    errors = [each for each in report.findings if each.severity == "error" and each.code not in codes]
    return [*(_beside_the_plan(each, steps, report) for each in errors), *shown]


def _idle_time(report: Document) -> Cause | None:
    """Tell how long the GPU of a profiled step is idle, if that is the largest part of what FP8 costs."""
    expects = estimate_told(report)
    if expects is None or not expects.idle_time_leads or expects.after or not expects.ran_ms:
        return None
    found = next((each for each in report.findings if each.code == IDLE), None)
    share = percent(100 * expects.ran_idle_ms / expects.ran_ms)
    return _cause_from(found) if found else Cause(f"The GPU is idle for {share} of the step.", IDLE)


def _unfixed(finding: Finding, report: Document) -> Cause:
    """Write a problem without a step in the plan; of one without a cause, the command that looks for it."""
    cause, again = _cause_from(finding), run_again(report.facts)
    if finding.code != UNKNOWN_CAUSE or not again:
        return cause
    return msgspec.structs.replace(cause, sentence=f"{cause.sentence} To look: {again} --trace step.json.gz")


def _not_compiled(report: Document) -> Iterator[Finding]:
    """Find that FP8 is not compiled, if the plan leaves FP8 off before compiled FP8 was timed."""
    if trial_view(report.facts).fp8_is_undecided:
        found = (each for each in report.findings if each.area == COMPILATION and each.severity != "info")
        yield from (each for each in found if each.treatment and traits(each.treatment.name).compiles)


def _cause_from(cause: Finding | Step, saving: Saving | None = None, report: Document | None = None) -> Cause:
    """Write a cause, and the ms of the step that it costs if a time proves them.

    Of leaving FP8 off they are the whole difference, whatever the cause.
    """
    of, where = cause.treatment, _timed_on(saving.from_ms, report) if saving and report else ""
    alike = of is not None and traits(of.name).helps_bf16_too
    both = report and alike and cause.code != IDLE and if_recorded(uses_fp8, report.facts)
    title = f"{cause.title.rstrip('.')}{', in BF16 too' if both and not where.startswith('BF16') else ''}"
    if saving is None or saving.from_ms is None or saving.low <= 0 or (of and of.name == STAY_IN_BF16):
        return Cause(as_sentence(title), cause.code)
    ms, whole = f"{saving.middle:,.1f}", f"{saving.from_ms:,.1f}"
    told = f"{ms} of {whole} ms/step{f' in {where}' if where else ''}"
    if " ms" in title:
        return Cause(as_sentence(title), cause.code, saving.middle)
    in_gap = not (alike or where.startswith("BF16"))
    return Cause(as_sentence(f"{title}: {told}"), cause.code, saving.middle, is_part_of_gap=in_gap)


def _timed_on(step_ms: float | None, report: Document) -> str:
    """Name the variant that a saving begins at; empty for the step as it is."""
    if step_ms is None:
        return ""
    names = labels(report.facts, numbers(report.prescription))
    bases = [each.name for each in report.facts.arms() if each.get("step_ms") == step_ms]
    return "" if step_ms == report.verdict.step_ms else next((names[each] for each in bases), "")


def _beside_the_plan(error: Finding, steps: Sequence[Step], report: Document) -> Cause:
    """Write an error that heads no fix, and the fix that ends it."""
    return Cause(
        as_sentence(f"{error.title.rstrip('.')}{fix_in_words(error, steps, report.facts)}"), error.code
    )


def gravest(report: Document) -> Finding | None:
    """Find what the verdict says of the job, else the first error."""
    breaks = (each for each in report.findings if each.get("breaks") == report.verdict.status)
    errors = (each for each in report.findings if each.severity == "error")
    return next(breaks, None) or next(errors, None)


def unfixed_problems(report: Document) -> Iterator[Finding]:
    """Find problems without a step in the plan whose fix was not timed and found useless."""
    planned = {code for step in report.prescription for code in step.mends}
    for finding in report.findings:
        troubles = finding.severity in ("warning", "error") and not gains_nothing(finding)
        if troubles and finding.code not in planned and finding.code not in DISTURBED:
            yield finding


def divided(found: Waterfall, report: Document) -> Cause:
    """Divide the difference of FP8 and BF16; its cost is that of the largest part."""
    others = (ms for name, ms in found.parts_ms.items() if name not in ("casts", "GEMMs"))
    return Cause(measured_parts(found, report), CASTS_COST, max(found.casts_unpaid_ms, *others))


def _without_a_cause(report: Document) -> list[Cause]:
    """Say what the cost model expects of the matmuls and casts, and why nothing more is known."""
    verdict = report.verdict
    not_timed = verdict.status == "not_measured" and not verdict.basis
    summary = not_timed or verdict.status in ("no_fp8", "too_noisy")
    told = summary_of_recipes(report) if summary else no_cause_known(report)
    timed = verdict.basis == "measured"
    if timed and verdict.status == "no_fp8" and (measured := _profiled_difference(report)):
        return [Cause(divided(measured, report).sentence)]
    unknown = verdict.status == "too_noisy" or (verdict.status == "not_measured" and timed)
    if unknown or not (parts := estimated_parts(report)):
        return [Cause(told, is_summary=summary)]
    return [Cause(parts)] if timed else [Cause(parts), Cause(told, is_summary=summary)]


def _profiled_difference(report: Document) -> Waterfall | None:
    """Return the difference that the screen divides below, of a job without FP8."""
    found = if_recorded(timing, report.facts)
    return found.waterfalls[0] if found and found.waterfalls else None


def as_sentence(title: str) -> str:
    first = title.partition(" ")[0]
    return f"{title[:1].upper() if first.isalpha() else title[:1]}{title[1:].rstrip('.')}."
