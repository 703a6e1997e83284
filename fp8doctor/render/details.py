"""The details that `-v`, Markdown, HTML and build servers add to the first screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from fp8doctor import registry
from fp8doctor.analysis.step_difference import HOST_BOUND_PCT, breakdown_of
from fp8doctor.analysis.treatment_table import FOR_FP8, OPTIMIZER_LAST, STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.variant_names import numbered
from fp8doctor.answer.verdict import GRAVE
from fp8doctor.areas import position
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Finding, Outcome, Saving, Treatment
from fp8doctor.registry import reason_of
from fp8doctor.render.environment_page import not_timed
from fp8doctor.render.header import counts, lacks_batch, steps_are_watched
from fp8doctor.render.timing import Timing, timing
from fp8doctor.render.words import HOW_KNOWN, Line, Mark
from fp8doctor.wording import rounded_ms

MARK_OF_SEVERITY: dict[str, Mark] = {"error": "bad", "warning": "warning", "info": "info"}


class Entry(Struct, frozen=True):
    """A finding or a step of the plan, explained."""

    number: int | None
    """Of the step; None for a finding next to the plan."""
    mark: Mark
    code: str
    """Empty for a step that the trial found and no check names."""
    name: str
    """Of the check, else of the treatment."""
    title: str
    saving: str
    """With its basis; empty if unknown, or if the step ``see`` gives it."""
    explanation: str
    treatment: str
    lines: str
    kind: str = "python"
    """Of the lines."""
    see: int | None = None
    """The step that fixes the finding or its cause."""

    @property
    def aside(self) -> str:
        """Return its saving, or the number of the step that has it."""
        return self.saving if self.see is None else f"see {self.see}"

    @property
    def label(self) -> str:
        """Introduce the treatment, and name the kind of its lines."""
        what = "Fix" if self.number else "Would change it"
        return f"{what} ({self.kind})" if self.kind != "python" else what


class Details(Struct, frozen=True):
    """All that is known next to the first screen."""

    counts: tuple[str, ...]
    timing: Timing | None
    entries: tuple[Entry, ...]
    """The steps of the plan, then the other findings."""
    outcomes: tuple[Line, ...]
    """Checks that found nothing, those with the same answer together."""
    not_looked_at: str
    unanswered: frozenset[str]
    """Codes of the checks that ``not_looked_at`` names."""
    gaps: tuple[str, ...]
    """Facts that could not be read or timed, with the reason."""
    recorded: str
    """When and by which version; empty if the time is unknown."""


def details(report: Document) -> Details:
    facts = report.facts
    made = f"Recorded {report.created_at} by fp8doctor {report.tool.version}."
    return Details(
        counts=counts(facts),
        timing=if_recorded(timing, facts),
        entries=tuple(entries(report)),
        outcomes=without_findings(report.outcomes),
        not_looked_at=not_looked_at(report),
        unanswered=frozenset(each.code for each in unanswered(report)),
        gaps=(*_gaps(facts), *not_timed(facts)),
        recorded=made if report.created_at else "",
    )


def numbers(steps: Iterable[Step]) -> dict[str, int]:
    """Number treatments as the plan does."""
    return {step.treatment.name: number for number, step in enumerate(steps, 1)}


def _gaps(facts: Facts) -> Iterator[str]:
    gaps = facts.get("gaps", {})
    yield from (f"Not read: {name}: {reason}" for name, reason in gaps.items())


def entries(report: Document) -> Iterator[Entry]:
    """Explain the steps of the plan in their order, then the findings that head none."""
    by_name = {finding.name: finding for finding in report.findings}
    for number, step in enumerate(report.prescription, 1):
        yield _of_step(number, step, by_name.get(next(iter(step.names), "")), report)
    heads = {name for step in report.prescription for name in step.names[:1]}
    for finding in report.findings:
        if finding.name not in heads:
            yield _without_step(finding, report, report.prescription)


def _of_step(number: int, step: Step, finding: Finding | None, report: Document) -> Entry:
    """Explain a step of the plan, by the finding that heads it if there is one."""
    also = f" (also fixes {', '.join(step.mends[1:])})" if step.mends[1:] else ""
    beside = numbered(step.together, numbers(report.prescription))
    return Entry(
        number=number,
        mark=mark_of(finding, report) if finding else "info",
        code=finding.code if finding else "",
        name=finding.name if finding else step.treatment.name,
        title=finding.title if finding else step.title,
        saving=", ".join(
            filter(None, (saving_in_words(step.saving_ms), beside and f"together with {beside}"))
        ),
        explanation=finding.explanation if finding else f"{step.title}.",
        treatment=f"{step.treatment.summary}{also}",
        lines=step.treatment.code,
        kind=step.treatment.kind,
    )


def _without_step(finding: Finding, report: Document, steps: Sequence[Step]) -> Entry:
    """Explain a finding that heads no step.

    With the step that fixes it, else with its own saving and, unless the trial refuted it, with its
    treatment.
    """
    see = fixed_by(finding, steps)
    told = see is not None or (finding.treatment is not None and finding.treatment.name == STAY_IN_BF16)
    says_all = finding.saving_ms is not None and not gained_alone(finding)
    change: Treatment | None = None if told or says_all else finding.treatment
    return Entry(
        number=None,
        mark="info" if see is None and gains_nothing(finding) else mark_of(finding, report),
        code=finding.code,
        name=finding.name,
        title=finding.title,
        saving="" if told else saving_in_words(finding.saving_ms),
        explanation=finding.explanation,
        treatment=change.summary if change else "",
        lines=change.code if change else "",
        kind=change.kind if change else "python",
        see=see,
    )


def fixed_by(finding: Finding, steps: Sequence[Step]) -> int | None:
    """Find the step with a finding's treatment, else one that fixes it or its cause."""
    name = finding.treatment.name if finding.treatment else None
    causes = set() if finding.severity == "info" else set(finding.caused_by)
    numbered = list(enumerate(steps, 1))
    itself = (number for number, step in numbered if step.treatment.name == name)
    also = (number for number, step in numbered if finding.name in step.names)
    cause = (number for number, step in numbered if causes.intersection(step.mends))
    return next(itself, None) or next(also, None) or next(cause, None)


def fix_in_words(finding: Finding, steps: Sequence[Step], facts: Facts) -> str:
    """Name the step that fixes a finding; staying in BF16 only leaves its cause behind."""
    fix = fixed_by(finding, steps)
    if fix is None and _is_of_fp8_alone(finding):
        fix = next((n for n, step in enumerate(steps, 1) if step.treatment.name == STAY_IN_BF16), None)
    if fix is None:
        return ""
    gone = steps[fix - 1].treatment.name == STAY_IN_BF16
    if gone and finding.treatment and finding.treatment.name in FOR_FP8:
        return " (its fix makes another job, not timed)"
    if finding.code == IDLE and if_recorded(_still_idle, facts):
        return f" (less with fix {fix})"
    untold = finding.code == EXPOSED and steps[fix - 1].saving_ms is None
    return f" (gone with fix {fix})" if gone else f" ({'see fix' if untold else 'fixed by'} {fix})"


def _still_idle(facts: Facts) -> bool:
    """Return whether the timed step that the plan ends in is idle for as long a share as a check reports."""
    end = TrialView(facts).end
    found = breakdown_of(end.arm) if end and not end.is_as_is else None
    step_ms = end.arm.step_ms if end else None
    return bool(found and step_ms and 100 * found.idle_ms > HOST_BOUND_PCT * step_ms)


EXPOSED = "DST005"
"""The check of communication that no compute covers: it is of the whole step, and copies have none."""


IDLE = "STP001"
"""The check whose finding is idle time of the GPU."""


def _is_of_fp8_alone(finding: Finding) -> bool:
    """Return whether nothing is left of a problem once the layers run in BF16."""
    if finding.treatment and finding.treatment.name == OPTIMIZER_LAST:
        return False
    check = registry.check_of(finding)
    return bool(check and check.changes_fp8 and not check.stays_in_bf16)


def mark_of(finding: Finding, report: Document) -> Mark:
    """Mark a finding by its severity; the plan's first is bad if it surely saves."""
    severity = finding.severity or "info"
    saves = finding.saving_ms is None or finding.saving_ms.low is None or finding.saving_ms.low > 0
    heads = bool(report.prescription) and report.prescription[0].code == finding.code
    return "bad" if severity == "warning" and saves and heads else MARK_OF_SEVERITY[severity]


def gained_alone(finding: Finding) -> bool:
    """Return whether its treatment was timed by itself, and saved time for sure."""
    saving = finding.saving_ms
    return saving is not None and saving.basis == "measured" and saving.low > 0


def gains_nothing(finding: Finding) -> bool:
    """Return whether its treatment was timed and saves nothing for sure, and speed is all it is about."""
    saving = finding.saving_ms
    in_vain = saving is not None and saving.basis == "measured" and saving.low <= 0
    return in_vain and finding.severity != "error" and not recorded(finding, "breaks")


def saving_in_words(saving: Saving | None) -> str:
    """Write a saving as a change: −208 to −347 ms/step, estimated for H100."""
    if saving is None or saving.low is None or saving.high is None:
        return ""
    small, large = _change(-saving.low), _change(-saving.high)
    if saving.from_ms is not None:
        small = large = _change(-saving.middle)
    gpu = f"for {saving.gpu}" if saving.basis == "modelled" else f"on {saving.gpu}"
    where = f" {gpu}" if saving.gpu else ""
    if not saving.low and saving.high > 0:
        return f"at most {large} ms/step, {HOW_KNOWN[saving.basis]}{where}"
    return f"{small if small == large else f'{small} to {large}'} ms/step, {HOW_KNOWN[saving.basis]}{where}"


def _change(ms: float) -> str:
    text = rounded_ms(ms)
    sign = "" if float(text.replace(",", "")) == 0 else "−" if ms < 0 else "+"
    return sign + text


MARK_OF_OUTCOME: dict[str, Mark] = {
    "healthy": "healthy",
    "refuted": "healthy",
    "not_applicable": "not_applicable",
    "unknown": "unknown",
    "crashed": "unknown",
}


def calm_areas(report: Document, troubled: set[str]) -> tuple[Line, ...]:
    """Mark each area without trouble: unknown if a check of it is, else healthy.

    A step that is slower than BF16 is not called healthy if no check of it found anything.
    """
    slower = report.verdict.status in ("fp8_slower", *GRAVE)
    marks: dict[str, set[Mark]] = {}
    for outcome in report.outcomes:
        if outcome.outcome != "sick" and outcome.area not in troubled:
            mark = MARK_OF_OUTCOME[outcome.outcome]
            unexplained = outcome.area == "step" and slower and mark == "healthy"
            aside = unexplained or _asks_of_another_way(outcome, report.facts)
            marks.setdefault(outcome.area, set()).add("not_applicable" if aside else mark)
    order: tuple[Mark, ...] = ("unknown", "healthy", "not_applicable")
    return tuple(
        Line(next(mark for mark in order if mark in marks[area]), area)
        for area in sorted(marks, key=position)
    )


def _asks_of_another_way(outcome: Outcome, facts: Facts) -> bool:
    """Return whether a check waits for facts that this way of looking never gives.

    A trial of a watched script, watched steps of a model, ranks of one process.
    """
    if not recorded(outcome, "missing"):
        return False
    several = facts.get("training.distributed.world_size", 1) > 1
    watched: bool = facts.get("target.kind") == "script"
    never = {"trial": watched, "observed": not watched, "ranks": not (watched and several)}
    return never.get(outcome.missing, False)


def _waits_to_be_timed(outcome: Outcome) -> bool:
    """Return whether a check lacks only a trial, or watched steps."""
    return outcome.missing in ("trial", "observed", "ranks")


def without_findings(outcomes: Iterable[Outcome]) -> tuple[Line, ...]:
    """List the checks that found nothing, those with the same answer together."""
    together: dict[tuple[Mark, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.outcome != "sick":
            answer = ", ".join(filter(None, (outcome.outcome.replace("_", " "), outcome.reason)))
            together.setdefault((MARK_OF_OUTCOME[outcome.outcome], answer), []).append(outcome.code)
    return tuple(
        Line(mark, "", f"{' '.join(codes)}: {answer}", tuple(codes))
        for (mark, answer), codes in together.items()
    )


def anything_timed(facts: Facts) -> bool:
    """Return whether the trial timed any variant."""
    return any(arm.get("tried") for arm in facts.arms())


def not_looked_at(report: Document) -> str:
    """List what this report says nothing about."""
    watched = report.facts.get("observed.steps_ms") is not None
    speed = "BF16 next to it (no copies were timed)" if watched else "speed (nothing was timed)"
    gaps = [
        *([] if anything_timed(report.facts) else [speed]),
        *_batch(report.facts),
        *_by_reason(unanswered(report), report.facts),
    ]
    return f"{', '.join(gaps)}." if gaps else ""


def _batch(facts: Facts) -> Iterator[str]:
    """Say why a watched step has no batch; `made_up` describes any other."""
    if recorded(facts, "workload") and lacks_batch(facts.workload) and steps_are_watched(facts):
        yield f"the batch ({(facts.workload.note or '').rstrip('.')})"


def unanswered(report: Document) -> tuple[Outcome, ...]:
    """Choose the checks that lack more than a trial or watched steps."""
    return tuple(
        outcome
        for outcome in report.outcomes
        if outcome.outcome == "unknown" and not _waits_to_be_timed(outcome)
    )


def _by_reason(unknown: Iterable[Outcome], facts: Facts) -> Iterator[str]:
    """Name checks that lack the same fact together, with the reason or its path."""
    groups: dict[str, list[str]] = {}
    unrecorded: dict[str, str] = {}
    for outcome in unknown:
        if reason := reason_of(outcome, facts):
            groups.setdefault(reason.rstrip("."), []).append(outcome.code)
        else:
            unrecorded[outcome.code] = outcome.missing
    if unrecorded:
        paths = ", ".join(dict.fromkeys(unrecorded.values()))
        yield f"{' '.join(unrecorded)} (not recorded: {paths})"
    yield from (f"{' '.join(codes)} ({reason})" for reason, codes in groups.items())
