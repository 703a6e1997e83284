"""What the first screen says, before it is laid out for the terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.areas import position
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.diagnosis.outlook import SMALL_PCT, outlook
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.finding import Finding, Saving, Treatment
from fp8doctor.render.counts import counts
from fp8doctor.render.header import machine, model, product
from fp8doctor.render.made_up import made_up
from fp8doctor.render.marks import Line, Mark
from fp8doctor.render.outcomes import calm_areas, not_looked_at, unanswered, without_findings
from fp8doctor.render.ranks import Ranks, ranks
from fp8doctor.render.timing import Timing, labels, timing

MARK_OF_SEVERITY: dict[str, Mark] = {"error": "bad", "warning": "warning", "info": "info"}


class Entry(Struct, frozen=True):
    """One finding in full, or one step of the trial's own. Those of the prescription are numbered."""

    number: int | None
    mark: Mark
    code: str
    """Empty when the trial found it and no check names it; the name is then that of the treatment."""
    name: str
    saving: str
    """In words, with what it rests on; empty if unknown, or if the step ``see`` tells it."""
    explanation: str
    treatment: str
    lines: str
    """What a user would write; empty where nothing is prescribed."""
    kind: str = "python"
    """Of the lines."""
    see: int | None = None
    """The numbered step that mends it or its cause; None where it stands for itself."""

    @property
    def aside(self) -> str:
        """What stands beside its name: what it saves, or where that is told."""
        return self.saving if self.see is None else f"see {self.see}"

    @property
    def label(self) -> str:
        """How the treatment is introduced; what does not run as it stands says so."""
        what = "Treatment" if self.number else "Would change it"
        return f"{what} ({self.kind})" if self.kind != "python" else what


class Screen(Struct, frozen=True):
    """The content of a report, in reading order."""

    machine: tuple[str, ...]
    """This program, the GPU, the versions."""
    model: str
    counts: tuple[str, ...]
    """Empty when no model was asked about."""
    verdict: str
    timing: Timing | None
    labels: dict[str, str]
    """Names of the variants of the trial, as the table of times has them; empty without a trial."""
    ranks: Ranks | None
    """None for a job of one process."""
    troubles: tuple[Line, ...]
    """One for each finding and each crashed check, in the order of the areas."""
    areas: tuple[Line, ...]
    """The areas without trouble, one mark each."""
    all_clear: str
    """A sentence when nothing was found; else empty."""
    prescription: tuple[Entry, ...]
    folded: str
    """The steps of the plan that save next to nothing, in one sentence; empty without any."""
    outlook: str
    """Where the plan ends; empty where nothing was examined."""
    others: tuple[Entry, ...]
    """Findings that no line of the prescription shows."""
    made_up: str
    """What of the job was made up, in a sentence; else empty."""
    not_looked_at: str
    unanswered: frozenset[str]
    """Codes of the checks that this names."""
    ignored: str
    """Which codes are left out, and why; empty where no reason was given."""
    first_code: str
    """The finding whose manual page to read first; empty without one."""
    outcomes: tuple[Line, ...]
    """What became of the checks that found nothing, those with the same answer together; without areas."""


def first_screen(report: Document, *, quiet: bool = False, whole: bool = False) -> Screen:
    """Write what a report says; with ``quiet`` only findings that are at least a warning, and the verdict.

    With ``whole`` no step of the plan is folded.
    """
    findings = [
        finding for finding in report.findings if not quiet or finding.severity in ("warning", "error")
    ]
    steps, small = plan(report, findings, whole=whole)
    prescription = _prescription(report, findings, steps)
    shown = {entry.code for entry in prescription} | {step.code for step in small}
    others = tuple(
        _beside_the_plan(finding, report, steps) for finding in findings if finding.code not in shown
    )
    healthy = any(outcome.outcome == "healthy" for outcome in report.outcomes)
    crashed = [] if quiet else [outcome for outcome in report.outcomes if outcome.outcome == "crashed"]
    troubles = [
        Line(_mark(finding, report), finding.area, f"{finding.title} ({finding.code})")
        for finding in findings
    ]
    troubles += [
        Line("unknown", outcome.area, f"check {outcome.code} crashed: {outcome.reason or 'no reason given'}")
        for outcome in crashed
    ]
    troubles.sort(key=lambda line: position(line.area))
    return Screen(
        machine=(f"fp8doctor {report.tool.version}", *machine(report.facts, report.modelled_gpu)),
        model=model(report.facts),
        counts=() if _only_environment(report) else counts(report.facts),
        verdict=report.verdict.summary,
        timing=if_recorded(timing, report.facts, numbers(steps)),
        labels=if_recorded(labels, report.facts, numbers(steps)) or {},
        ranks=ranks(report.facts),
        troubles=tuple(troubles),
        areas=() if quiet else calm_areas(report, {line.area for line in troubles}),
        all_clear=_all_clear(report) if healthy and not report.findings else "",
        prescription=prescription,
        folded=_folded(small),
        outlook=outlook(report, steps).sentence,
        made_up="" if quiet else made_up(report.facts),
        others=others,
        not_looked_at="" if quiet else not_looked_at(report),
        unanswered=frozenset(each.code for each in unanswered(report)),
        ignored="; ".join(f"{code} ({reason})" for code, reason in report.ignored.items()),
        first_code=next((entry.code for entry in (*prescription, *others) if entry.code), ""),
        outcomes=without_findings(report.outcomes),
    )


def _all_clear(report: Document) -> str:
    """Write what to say when no check found anything; nothing where the trial found something by itself."""
    if report.verdict.status == "step_raises":
        return ""
    if report.verdict.status == "fp8_slower" and report.verdict.basis == "measured":
        return "FP8 is slower than BF16 here, and no check of this version explains why."
    if report.verdict.basis == "modelled" and (report.verdict.achievable_speedup or 1.0) < 1:
        return (
            "The cost model expects FP8 to be slower than BF16 here, and no check explains why; only a "
            "trial on the GPU tells."
        )
    return "" if report.prescription else "Nothing was found that should be changed."


def _only_environment(report: Document) -> bool:
    facts = report.facts
    return recorded(facts, "target.kind") and facts.target.kind == "environment"


def _mark(finding: Finding, report: Document) -> Mark:
    """Write the mark of a finding; the one that heads the prescription is bad whatever its severity, unless
    information or it may save nothing."""
    severity = finding.severity or "info"
    saves = finding.saving_ms is None or finding.saving_ms.low is None or finding.saving_ms.low > 0
    if (
        severity == "warning"
        and saves
        and report.prescription
        and report.prescription[0].code == finding.code
    ):
        return "bad"
    return MARK_OF_SEVERITY[severity]


def _steps(report: Document, findings: Iterable[Finding]) -> list[Step]:
    """Write the steps in their order: those of the findings shown, and those that the trial found by
    itself."""
    shown = {finding.code for finding in findings}
    return [step for step in report.prescription if step.code in shown or not step.code]


def plan(
    report: Document, findings: Iterable[Finding], *, whole: bool = False
) -> tuple[list[Step], list[Step]]:
    """Write the steps that are shown and numbered, and those that are folded because they save next to
    nothing."""
    steps = _steps(report, findings)
    small = [] if whole else [step for step in steps if _is_small(step, report)]
    return [step for step in steps if step not in small], small


def numbers(steps: Iterable[Step]) -> dict[str, int]:
    """Number treatments as the plan does."""
    return {step.treatment.name: number for number, step in enumerate(steps, 1)}


def _is_small(step: Step, report: Document) -> bool:
    """Whether all that a step of the plan does is to save next to nothing; what was modelled for a GPU is no
    share of a CPU's step."""
    whole, saving = report.verdict.step_ms, step.saving_ms
    mends = [each for each in report.findings if each.code in step.mends]
    grave = any(each.severity == "error" or recorded(each, "breaks") for each in mends)
    if grave or saving is None or not whole:
        return False
    if saving.basis == "modelled" and not ran_on_a_gpu(report.facts):
        return False
    return saving.high < SMALL_PCT / 100 * whole


def _folded(steps: Sequence[Step]) -> str:
    """Name the steps that save next to nothing."""
    names = ", ".join(f"{step.code} {step.treatment.name}".lstrip() for step in steps)
    each = " each" if len(steps) > 1 else ""
    return f"Under {SMALL_PCT:g} % of the step{each} (-v shows more): {names}." if steps else ""


def _prescription(report: Document, findings: Iterable[Finding], steps: Sequence[Step]) -> tuple[Entry, ...]:
    by_code = {finding.code: finding for finding in findings}
    return tuple(
        _entry(by_code[step.code], report, number, step, saving_in_words(by_code[step.code].saving_ms))
        if step.code
        else _found_by_the_trial(step, number)
        for number, step in enumerate(steps, 1)
    )


def _beside_the_plan(finding: Finding, report: Document, steps: Sequence[Step]) -> Entry:
    """Write a finding that heads no step: with the step that mends it or its cause, else with its own saving
    and, unless the trial refuted it, with what would change it.

    What BF16 would save is told where it is prescribed only.
    """
    name = finding.treatment.name if finding.treatment else None
    causes = set() if finding.severity == "info" else set(finding.caused_by)
    itself = (number for number, step in enumerate(steps, 1) if step.treatment.name == name)
    also = (number for number, step in enumerate(steps, 1) if finding.code in step.mends)
    cause = (number for number, step in enumerate(steps, 1) if causes.intersection(step.mends))
    see = next(itself, None) or next(also, None) or next(cause, None)
    told = see is not None or name == STAY_IN_BF16
    saving = "" if told else saving_in_words(finding.saving_ms)
    says_all = finding.saving_ms is not None and not gained_alone(finding)
    open_ = None if told or says_all else finding.treatment
    return _entry(finding, report, saving=saving, see=see, treatment=open_)


def gained_alone(finding: Finding) -> bool:
    """Whether what would change it was timed by itself, and saved time for sure."""
    saving = finding.saving_ms
    return saving is not None and saving.basis == "measured" and saving.low > 0


def _found_by_the_trial(step: Step, number: int) -> Entry:
    return Entry(
        number=number,
        mark="info",
        code="",
        name=step.treatment.name,
        saving=saving_in_words(step.saving_ms),
        explanation=f"{step.title}.",
        treatment=step.treatment.summary,
        lines=step.treatment.code,
        kind=step.treatment.kind,
    )


def _entry(
    finding: Finding,
    report: Document,
    number: int | None = None,
    step: Step | None = None,
    saving: str = "",
    see: int | None = None,
    treatment: Treatment | None = None,
) -> Entry:
    also = f" (also mends {', '.join(step.mends[1:])})" if step and step.mends[1:] else ""
    treatment = step.treatment if step else treatment
    return Entry(
        number=number,
        mark=_mark(finding, report),
        code=finding.code,
        name=finding.name,
        saving=saving,
        explanation=finding.explanation,
        treatment=f"{treatment.summary}{also}" if treatment else "",
        lines=treatment.code if treatment else "",
        kind=treatment.kind if treatment else "python",
        see=see,
    )


def saving_in_words(saving: Saving | None) -> str:
    """Tell what is saved of a step, as the change it makes, and what the number rests on: −208 to −347 ms a
    step, modelled on H100 SXM."""
    if saving is None or saving.low is None or saving.high is None:
        return ""
    small, large = _change(-saving.low), _change(-saving.high)
    where = f" on {product(saving.gpu) if saving.basis == 'modelled' else saving.gpu}" if saving.gpu else ""
    basis = "by rule" if saving.basis == "rule" else saving.basis
    return f"{small if small == large else f'{small} to {large}'} ms a step, {basis}{where}"


def _change(ms: float) -> str:
    text = f"{abs(ms):,.0f}" if abs(ms) >= 9.95 else f"{abs(ms):,.1f}"
    sign = "" if float(text.replace(",", "")) == 0 else "−" if ms < 0 else "+"
    return sign + text
