"""Each fix of the plan and each other finding, once: what it saves, what ends it, and its lines."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from fp8doctor import registry
from fp8doctor.analysis.treatment_table import OPTIMIZER_LAST, STAY_IN_BF16, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Basis, Finding, Outcome, Saving
from fp8doctor.wording import plural, rounded_ms

Mark = Literal["bad", "warning", "info", "healthy", "not_applicable", "unknown"]

MARK_OF_SEVERITY: dict[str | None, Mark] = {"error": "bad", "warning": "warning"}

HOW_KNOWN: dict[Basis | None, str] = {
    "measured": "measured",
    "modelled": "estimated",
    "rule": "by rule",
    None: "",
}
"""Basis of a number -> the same in words."""

AREAS = {"engagement": "FP8 engaged", "step": "step time"}
"""Areas of checks -> what they are about; the others are words."""

GAINS_NOTHING = "Expected, but the fix gained nothing beyond noise when timed: "
"""Stands before a finding that needs no change."""

HOW_TO_USE = {
    "shell": "in the shell",
    "yaml": "in the job's YAML file",
    "sketch": "adapt these lines: fp8doctor could not see where your script does this",
}
"""Kind of lines -> what to do with them; Python's need no word."""

LESS = ("host-bound", "exposed-communication")
"""Rules about time that a faster step has less of."""


class Marked(Struct, frozen=True):
    """One line of a list."""

    mark: Mark | None
    text: str
    name: str = ""
    code: str = ""
    """Of a check, to look up."""
    lines: str = ""
    """To type."""


class Item(Struct, frozen=True):
    """A fix of the plan, or a finding that heads none."""

    number: int | None
    """Of the fix."""
    mark: Mark
    code: str
    """Empty for a fix that the trial found and no check names."""
    name: str
    title: str
    aside: str
    """Of a fix: where it is written, what it saves. Of a finding: what ends it."""
    explanation: str = ""
    summary: str = ""
    """Of its change; empty if a fix of the plan ends it."""
    lines: str = ""
    is_note: bool = False
    """True for a finding that is only information."""
    is_beside: bool = False
    """True if its lines stand next to the plan, because they free memory and no time."""


def items(
    view: TrialView, findings: Sequence[Finding], steps: Sequence[Step], causes: Collection[str]
) -> Iterator[Item]:
    """List the fixes in their order, then the other findings; ``causes`` are named above them."""
    by_name = {each.name: each for each in findings}
    for number, step in enumerate(steps, 1):
        found = by_name.get(next(iter(step.names), ""))
        others = [each for each in step.mends if each != step.code]
        first = next(at for at, each in enumerate(steps, 1) if each.treatment.code == step.treatment.code)
        shown_in = first if first < number else None
        also = f" Also fixes {', '.join(others)}." if others else ""
        yield Item(
            number=number,
            mark=MARK_OF_SEVERITY.get(found.severity if found else None, "info"),
            code=step.code,
            name=found.name if found else step.treatment.name,
            title=found.title if found else step.title,
            aside=_fix_aside(step, steps, view, shown_in),
            explanation=f"{found.explanation if found else ''}{also}".strip(),
            summary=step.treatment.summary,
            lines="" if shown_in else step.treatment.code,
        )
    heads = {name for step in steps for name in step.names[:1]}
    for finding in (each for each in findings if each.name not in heads):
        vain, saving, change = gains_nothing(finding), finding.saving_ms, finding.treatment
        ended = _ended_by(finding, steps)
        helps = saving is None or saving.basis == "modelled" or saving.low > 0
        if ended or view.gives_up_fp8 or not helps:
            change = None
        is_beside = change is not None and traits(change.name).for_memory and finding.name in causes
        is_beside &= not any(recorded(step, "peak_gib") for step in steps)  # which free it already
        yield Item(
            number=None,
            mark="info" if vain else MARK_OF_SEVERITY.get(finding.severity, "info"),
            code=finding.code,
            name=finding.name,
            title=f"{GAINS_NOTHING if vain and not ended else ''}{finding.title}",
            aside=change.summary if change and is_beside else ended,
            explanation=finding.explanation,
            summary=change.summary if change and not is_beside else "",
            lines=change.code if change else "",
            is_note=finding.severity == "info" and finding.name not in causes,
            is_beside=is_beside,
        )


def _fix_aside(step: Step, steps: Sequence[Step], view: TrialView, shown_in: int | None) -> str:
    """Say where a fix is written, what it saves and with which others, or that it has no time.

    ``shown_in`` is the number of an earlier fix with the same lines.
    """
    has_lines = any(line.strip() and line.strip()[0] != "#" for line in step.treatment.code.splitlines())
    how = f"in the lines of fix {shown_in}" if shown_in else HOW_TO_USE.get(step.treatment.kind, "")
    numbers, saving = {each.treatment.name: number for number, each in enumerate(steps, 1)}, step.saving_ms
    beside = " and ".join(f"fix {numbers[each]}" for each in step.together if each in numbers)
    if saving is None:
        gives = f"its saving is counted in {beside.partition(' and ')[0]}" if beside else ""
        gives = gives or if_recorded(_not_timed, step, view) or "by rule, saving unknown"
    else:
        begins = saving.from_ms  # a model is converted, then compiled
        later = steps[numbers[step.treatment.name] :] if begins else ()
        ends = (each for each in later if each.saving_ms and each.saving_ms.to_ms == begins)
        after = next((f"with fix {numbers[each.treatment.name]} " for each in ends), "")
        depths = " at two depths" if saving.basis == "measured" and view.facts.get("trial.blocks") else ""
        gives = f"{f'together with {beside} ' if beside else ''}{saves(saving, after)}{depths}"
    return "; ".join(filter(None, (how * has_lines, gives)))


def saves(saving: Saving, after: str = "") -> str:
    """Write a saving and its basis: saves 28.0 ms/step, from 120.5 to 92.5, measured."""
    how = HOW_KNOWN[saving.basis]
    if saving.from_ms is not None and saving.to_ms is not None:
        times = f"from {saving.from_ms:,.1f} {after}to {saving.to_ms:,.1f}"
        return f"saves {saving.middle:,.1f} ms/step, {times}, {how}"
    how += f" for {saving.gpu}" if saving.gpu else ""
    low, high = (f"{'−' * (each < 0)}{rounded_ms(each)}" for each in (saving.low, saving.high))
    return f"saves {f'{low} to {high}' if saving.low > 0 else f'at most {high}'} ms/step, {how}"


def _not_timed(step: Step, view: TrialView) -> str:
    """Say that a trial on a GPU has no time of a fix; empty without a trial."""
    name, tried = step.treatment.name, [each for each in view.facts.arms() if each.tried]
    if not view.on_gpu or not tried or any(name in each.get("treatments", ()) for each in tried):
        return ""
    return "not timed" if traits(name).runs else "not timed: fp8doctor cannot apply it"


def _ended_by(finding: Finding, steps: Sequence[Step]) -> str:
    """Name the fix that ends a finding or its cause; leaving FP8 off ends what only FP8 has."""
    name, check = finding.treatment.name if finding.treatment else None, registry.check_of(finding)
    is_of_fp8_alone = name != OPTIMIZER_LAST and check and check.changes_fp8 and not check.stays_in_bf16
    causes = set() if finding.severity == "info" else set(finding.caused_by)
    ends = (
        lambda step: step.treatment.name == name,
        lambda step: finding.name in step.names,
        lambda step: causes.intersection(step.mends),
        lambda step: step.treatment.name == STAY_IN_BF16 and is_of_fp8_alone,
    )
    found = next((number for ends_it in ends for number, step in enumerate(steps, 1) if ends_it(step)), None)
    if found is None:
        return ""
    if finding.name in LESS:
        return f"less with fix {found}"
    return f"{'gone with fix' if steps[found - 1].treatment.name == STAY_IN_BF16 else 'fixed by'} {found}"


def gains_nothing(finding: Finding) -> bool:
    """Return whether its treatment was timed and saves nothing for sure, and speed is all it is about."""
    saving = finding.saving_ms
    in_vain = saving is not None and saving.basis == "measured" and saving.low <= 0
    return in_vain and finding.severity != "error" and not recorded(finding, "breaks")


MARK_OF_OUTCOME: dict[str, Mark] = {
    "not_applicable": "not_applicable",
    "unknown": "unknown",
    "crashed": "unknown",
}

CHECKS: dict[Mark, str] = {
    "healthy": "found nothing",
    "not_applicable": "not applicable",
    "unknown": "without an answer (-v says why)",
}
"""Mark of checks without a finding -> its words."""


def counted(outcomes: Iterable[Outcome], facts: Facts) -> Iterator[str]:
    """Count the checks without a finding.

    What waits for facts that this way of looking never gives does not apply: watched steps of a model, the
    ranks of one process.
    """
    watched = facts.get("target.kind") == "script"
    several = watched and facts.get("training.distributed.world_size", 1) > 1
    never = {*(() if watched else ("observed",)), *(() if several else ("ranks",))}
    marks = Counter(
        "not_applicable" if each.get("missing") in never else MARK_OF_OUTCOME.get(each.outcome, "healthy")
        for each in outcomes
        if each.outcome != "fires"
    )
    for mark, words in CHECKS.items():
        if marks[mark]:
            yield f"{plural(marks[mark], 'check')} {words}"


def without_findings(outcomes: Iterable[Outcome]) -> tuple[Marked, ...]:
    """List the checks that found nothing, those with the same answer together."""
    together: dict[tuple[Mark, str], list[str]] = {}
    for each in outcomes:
        if each.outcome != "fires":
            word = "nothing found" if each.outcome == "silent" else each.outcome.replace("_", " ")
            said = ", ".join(filter(None, (word, each.reason)))
            together.setdefault((MARK_OF_OUTCOME.get(each.outcome, "healthy"), said), []).append(each.code)
    return tuple(Marked(mark, f"{' '.join(codes)}: {said}") for (mark, said), codes in together.items())
