"""The content of the first screen: answer, variants, their parts, and the plan.

Terminal, Markdown, HTML and notebooks render this one model; `fp8doctor.render.details` has what they add.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from fp8doctor.analysis.arms import is_finite
from fp8doctor.analysis.noise import is_noise
from fp8doctor.analysis.outcome import relative_to_bf16
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.commands import more_time, more_time_s
from fp8doctor.answer.sentences import Box, Tone, box
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.facts import Arm, Facts, Trial, if_recorded
from fp8doctor.finding import Finding, Outcome
from fp8doctor.render.details import (
    calm_areas,
    fix_in_words,
    gained_alone,
    gains_nothing,
)
from fp8doctor.render.header import job_facts, machine, made_up, model
from fp8doctor.render.planned_fixes import Fix, saves, shown_fix
from fp8doctor.render.rank_lines import RankLines, ranks
from fp8doctor.render.timing import COLUMNS, NONE_MS, Timing, drawn_ms, timing
from fp8doctor.render.words import AREAS, FAMILIES, Mark
from fp8doctor.wording import plural, times

NOISY = "noisy"
"""Stands for a ratio that the timing does not tell."""


NOT_FINITE = "NaN"
"""Stands for the speed of a step whose loss or gradients are NaN or infinite."""


LONG_S = 300
"""Seconds from which a time to wait is written in minutes."""


LONGEST_REASON = 200
"""Characters of a reason that are shown below the table: two lines of a terminal. A choice of length."""


WITHOUT_A_PRONOUN = {
    "^it changes (.+), which has no time$": r"needs \1, which was not timed",
    "(too small|too little memory left) for it$": r"\1",
    "^it ": "",
}
"""Reason of one variant -> reason of several."""


class VariantRow(Struct, frozen=True):
    """A timed step."""

    label: str
    tone: Tone
    ms: float
    step: str
    spread: str
    parts: tuple[tuple[str, float], ...]
    """Family -> ms; empty if it was not profiled."""
    speed: str
    """BF16's time / its own; empty if there is nothing to hold it to."""
    memory: str


class NoticeLine(Struct, frozen=True):
    """A finding next to the plan, in one line."""

    mark: Mark
    text: str
    code: str


class Screen(Struct, frozen=True, kw_only=True):
    """The first screen, in reading order; a part without content is empty."""

    job: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """What decides about FP8 in this job: a label, and a line."""
    box: Box
    variants: tuple[VariantRow, ...] = ()
    method: str = ""
    """How the variants were timed; empty if none was."""
    untimed: str = ""
    ranks: RankLines | None = None
    fixes: tuple[Fix, ...] = ()
    notices: tuple[NoticeLine, ...] = ()
    notes: str = ""
    areas: tuple[tuple[Mark, str], ...] = ()
    made_up: str = ""
    ignored: str = ""
    next: tuple[str, ...] = ()
    command: str = ""
    """Begins one of ``next`` and stays whole, so that it can be copied; empty if none looks at the job."""


def first_screen(report: Document, *, quiet: bool = False, held_in: str = "") -> Screen:
    """Write the first screen of a report.

    ``quiet`` writes the answer, warnings and errors alone, those that head a fix too. ``held_in`` names
    Python's variable of the report.
    """
    facts = report.facts
    steps = report.prescription
    heads = {name for step in steps for name in step.names[:1]}
    beside = [each for each in report.findings if quiet or each.name not in heads]
    timed, said = if_recorded(timing, facts), box(report.answer)
    troubled = {each.area for each in report.findings} | {each.area for each in _crashed(report)}
    notices = tuple(_notices(report, beside, steps))
    if quiet:
        return Screen(box=said, notices=tuple(each for each in notices if each.mark != "info"))
    return Screen(
        job=(f"fp8doctor {report.tool.version}", *filter(None, [model(facts)])),
        machine=machine(facts, report.modelled_gpu),
        facts=job_facts(facts, report.verdict.tokens_per_s, report.findings),
        box=said,
        variants=tuple(_variants(timed, report)),
        method=timed.basis if timed else "",
        untimed=_untimed(timed),
        ranks=ranks(facts),
        fixes=tuple(shown_fix(step, steps, facts) for step in steps),
        notices=notices,
        notes=_notes(report, {name for step in steps for name in step.names}),
        areas=tuple(_areas(report, troubled)),
        made_up=made_up(facts),
        ignored="; ".join(f"{code} ({reason})" for code, reason in report.ignored.items()),
        next=tuple(_next(report, steps, notices, held_in)),
        command=_too_long_for_the_box(report),
    )


def _crashed(report: Document) -> list[Outcome]:
    return [each for each in report.outcomes if each.outcome == "crashed"]


def _variants(timing: Timing | None, report: Document) -> Iterator[VariantRow]:
    for row in timing.rows if timing else ():
        if row.arm is not None and row.arm.step_ms:
            speed, tone = if_recorded(_speed, report.facts, row.arm) or ("", "plain")
            yield VariantRow(
                label=row.label,
                tone=tone,
                ms=row.arm.step_ms,
                step=f"{row.arm.step_ms:,.1f}",
                spread=row.spread,
                parts=tuple(_parts(row.arm)),
                speed=speed,
                memory=row.memory,
            )


def _parts(arm: Arm) -> Iterator[tuple[str, float]]:
    """Write the families of a bar; none if the parts cannot be relied on."""
    times = drawn_ms(arm)
    columns = dict(zip((*COLUMNS, "idle"), times, strict=True)) if times else {}
    for family, names in FAMILIES.items() if columns else ():
        ms = sum(columns[name] for name in names)
        if ms >= NONE_MS:
            yield family, ms


def _speed(facts: Facts, arm: Arm) -> tuple[str, Tone]:
    """Write a step's speed as a multiple of the best BF16's, and its tone by the BF16 with its changes."""
    if not is_finite(arm):
        return NOT_FINITE, "bad"
    found = relative_to_bf16(facts, arm)
    if found is None:
        return "", "plain"
    if arm is found.best:
        return "1x", "plain"
    if is_noise(found.best, arm, facts.trial) or TrialView(facts).allowed:
        return NOISY, "plain"
    tone: Tone = "good" if found.gains else "bad" if found.loses else "plain"
    return times(found.best.step_ms, arm.step_ms), tone


def _untimed(timing: Timing | None) -> str:
    """Name the variants that were not timed, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for row in timing.rows if timing else ():
        if row.reason:
            reasons.setdefault(row.reason, []).append(row.label)
    told = "; ".join(f"{' · '.join(each)} ({_in_short(why)})" for why, each in reasons.items())
    return f"Not timed: {told}." if told else ""


def _in_short(reason: str) -> str:
    """Keep the first sentence of a long message, or what fits of it; ``-v`` shows all.

    It stands behind several variants, so it has no pronoun.
    """
    for told, in_a_list in WITHOUT_A_PRONOUN.items():
        reason = re.sub(told, in_a_list, reason)
    if len(reason) <= LONGEST_REASON:
        return reason
    first = reason.partition(". ")[0]
    return first if len(first) <= LONGEST_REASON else f"{first[:LONGEST_REASON].rpartition(' ')[0]} ..."


def _notices(report: Document, beside: Sequence[Finding], steps: Sequence[Step]) -> Iterator[NoticeLine]:
    """Write errors and warnings that head no fix, and checks that crashed."""
    told = {each.code for each in report.answer.causes}
    for finding in beside:
        if finding.severity in ("warning", "error") and finding.code not in told:
            vain = gains_nothing(finding)
            fixed = fix_in_words(finding, steps, report.facts)
            text = f"{GAINS_NOTHING if vain and not fixed else ''}{finding.title}"
            text += fixed or ("" if vain else _on_its_own(finding, steps))
            mark: Mark = "info" if vain else "bad" if finding.severity == "error" else "warning"
            yield NoticeLine(mark, text, finding.code)
    for outcome in _crashed(report):
        reason = outcome.reason or "no reason given"
        yield NoticeLine("unknown", f"check {outcome.code} crashed: {reason}", outcome.code)


GAINS_NOTHING = "Expected, but the fix gained nothing beyond noise when timed: "
"""Stands before a finding that needs no change."""


def _on_its_own(finding: Finding, steps: Sequence[Step]) -> str:
    """Name a change that gained alone and is in no plan; none of FP8 if the plan stays in BF16."""
    change = finding.treatment
    gives_up = any(step.treatment.name == STAY_IN_BF16 for step in steps)
    if change is None or gives_up or not gained_alone(finding):
        return ""
    return f" ({change.summary}: on its own, this {saves(finding.saving_ms)})"


def _notes(report: Document, told: set[str]) -> str:
    """Fold what is only information into one line."""
    infos = [each for each in report.findings if each.severity == "info" and each.name not in told]
    titles = "; ".join(f"{each.title.rstrip('.')} ({each.code})" for each in infos)
    return f"{plural(len(infos), 'note')}: {titles}" if infos else ""


def _areas(report: Document, troubled: set[str]) -> Iterator[tuple[Mark, str]]:
    """Count the areas by what is known of them, and name those that were not checked."""
    of: dict[Mark, list[str]] = {}
    for line in calm_areas(report, troubled):
        of.setdefault(line.mark, []).append(AREAS.get(line.area, line.area))
    if fine := of.get("healthy"):
        yield "healthy", f"{plural(len(fine), 'area')} fine"
    if aside := of.get("not_applicable"):
        yield "not_applicable", f"{len(aside)} {'does' if len(aside) == 1 else 'do'} not apply"
    if unknown := of.get("unknown"):
        yield "unknown", f"{len(unknown)} not fully checked (-v says why): {', '.join(unknown)}"


def _next(
    report: Document, steps: Sequence[Step], notices: Sequence[NoticeLine], held_in: str
) -> Iterator[str]:
    """Name the next commands, and explain a code that is shown: for a shell, or for Python."""
    codes = (*(step.code for step in steps), *(line.code for line in notices))
    view = TrialView(report.facts)
    decided = view.gives_up_fp8 and view.has_little_to_gain
    first, option = next(filter(None, codes), ""), "" if decided else more_time(report.facts)
    more = f"{option} to time more variants{_added(report.facts.trial)}" if option else ""
    if long := _too_long_for_the_box(report):
        yield f"{long} answers what is open"
    if held_in:
        yield f'{held_in}.save("report.json")'
        yield from filter(None, [more])
        yield "in a shell: fp8doctor report -v report.json"
    if first in {each.code for each in report.findings if each.severity != "info"}:
        yield f"fp8doctor explain {first}"
    if held_in:
        return
    yield from filter(None, [more])
    yield "-v shows more"
    yield "-o report.html"


LONG = 80
"""Characters of a command that a box of 100 columns breaks. A choice."""


def _too_long_for_the_box(report: Document) -> str:
    """Return the command of the line Open if a box would break it, so that it cannot be copied there."""
    command = report.answer.command
    return command if len(command) > LONG and "\n" not in command else ""


def _added(trial: Trial) -> str:
    """Say how much longer than this trial the budget for the variants left out may take."""
    spent_s, budget_s = trial.get("elapsed_s"), more_time_s(trial)
    if spent_s is None or budget_s is None:
        return ""
    added_s = budget_s - round(spent_s)
    return f", up to {f'{added_s:.0f} s' if added_s < LONG_S else f'{added_s / 60:.0f} min'} more"
