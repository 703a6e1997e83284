"""Checks that found nothing, areas without trouble, and checks without an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8doctor.areas import position
from fp8doctor.diagnosis.answer import GRAVE
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Outcome
from fp8doctor.registry import reason_of
from fp8doctor.render.header import lacks_batch, steps_are_watched
from fp8doctor.render.words import Line, Mark

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
    """Return whether a check lacks only a trial, or watched steps of a script or ranks."""
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


def _anything_timed(report: Document) -> bool:
    return any(arm.get("tried") for arm in report.facts.arms())


def not_looked_at(report: Document) -> str:
    """List what this report says nothing about."""
    watched = recorded(report.facts, "observed.steps_ms")
    speed = "BF16 next to it (no copies were timed)" if watched else "speed (nothing was timed)"
    gaps = [
        *([] if _anything_timed(report) else [speed]),
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
    """Name checks that lack the same fact together, with the reason or the fact's path."""
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
