"""Savings that the trial measured: of a change alone, and of each fix on the way to the plan's end.

A finding whose change saves nothing is refuted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8doctor.analysis.arms import measured_saving
from fp8doctor.analysis.plan_end import Link, kind, pair_in_use, way
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import if_recorded
from fp8doctor.finding import Finding, Outcome, Saving


def with_measured_savings(
    view: TrialView, findings: Sequence[Finding], outcomes: Sequence[Outcome]
) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Return the findings with savings that a GPU measured, refuted ones marked.

    A variant must have carried out the treatment alone. A refuted finding keeps its saving, zero or negative,
    and becomes information. If the treatment needs too much memory, its finding stays and says so.
    """
    if not view.on_gpu:
        return tuple(findings), tuple(outcomes)
    weighed, refuted = [], {}
    for finding in (_without_too_large(view, each) for each in findings):
        saved = if_recorded(_saved_alone, view, finding)
        if saved is not None:
            finding = msgspec.structs.replace(finding, saving_ms=saved)
            if saved.high <= 0:
                finding = msgspec.structs.replace(finding, severity="info")
                refuted[finding.code] = (
                    f"measured: {finding.treatment.name if finding.treatment else ''} costs "
                    f"{-saved.middle:,.1f} ms/step instead of saving"
                )
        weighed.append(finding)
    judged = tuple(
        msgspec.structs.replace(outcome, outcome="refuted", reason=refuted[outcome.code])
        if outcome.code in refuted
        else outcome
        for outcome in outcomes
    )
    return tuple(weighed), judged


def _without_too_large(view: TrialView, finding: Finding) -> Finding:
    treatment = finding.treatment
    found = view.too_large.get((treatment.name,)) if treatment else None
    if treatment is None or found is None:
        return finding
    why = f"A fix for it, {treatment.summary}, is not in the plan: {found.reason}."
    return msgspec.structs.replace(
        finding, explanation=f"{finding.explanation} {why}", treatment=None, saving_ms=None
    )


def _saved_alone(view: TrialView, finding: Finding) -> Saving | None:
    """Return a finding's saving as timed with only its treatment; else None.

    A finding of a measured check brings its own. BF16 is compared with the best FP8: the rest of its saving
    is the other treatments' gain. If the plan leaves FP8 off, a treatment that helps BF16 too is judged in
    BF16, and one that gains nothing alone is judged with the plan's other changes.
    """
    if finding.treatment is None or (finding.saving_ms is not None and finding.saving_ms.basis == "measured"):
        return None
    if finding.treatment.name == STAY_IN_BF16:
        fp8 = view.fp8 if view.uses_fp8 else None
        return measured_saving(view.facts.trial, fp8, view.bf16) if fp8 and view.bf16 else None
    name, end = finding.treatment.name, view.end
    alone, in_bf16 = view.savings.get(name), view.gives_up_fp8 and traits(name).helps_bf16_too
    if end is None or not (in_bf16 or (alone and alone.high <= 0)):
        return alone
    pair = pair_in_use(view.facts, end, name)
    saved = measured_saving(view.facts.trial, *pair) if pair else None if in_bf16 else alone
    return None if saved and saved.high <= 0 and name in end.changes else saved


def on_the_way(view: TrialView, plan: Sequence[Step], broken: frozenset[str]) -> tuple[Step, ...]:
    """Give each fix its saving on the way to the plan's end, in the order of that way after ``broken``.

    These savings add up to the plan's. Fixes that save together have one, the first of them. A fix that is no
    part of the way, or shares it with a change that no fix makes, keeps no saving but an estimate.
    """
    links = way(view.facts, view.end) if view.end else ()
    if not links:
        return tuple(plan)
    part = {name: number for number, link in enumerate(links) for name in link.names}
    steps = [(part.get(kind(step.treatment.name, view.facts), NO_PART), step) for step in plan]
    free = [
        place
        for place, (number, step) in enumerate(steps)
        if number != NO_PART and view.uses_fp8 and not broken.intersection(step.names)
    ]
    in_order = sorted((steps[place] for place in free), key=lambda each: each[0])
    for place, each in zip(free, in_order, strict=True):
        steps[place] = each
    return tuple(_with_its_part(step, number, steps, links, view) for number, step in steps)


NO_PART = -1
"""Stands for the link of a fix that is no part of the way."""


def _with_its_part(
    step: Step, number: int, steps: Sequence[tuple[int, Step]], links: Sequence[Link], view: TrialView
) -> Step:
    names = [each.treatment.name for of, each in steps if of == number]
    if number == NO_PART or len(names) < len(links[number].names):
        elsewhere = step.treatment.name in view.savings
        return msgspec.structs.replace(step, saving_ms=None) if elsewhere else step
    link = links[number]
    untimed = STAY_IN_BF16 in link.names and view.own_bf16_left_out is not None
    leads = step.treatment.name == names[0] and not untimed
    return msgspec.structs.replace(
        step,
        saving_ms=measured_saving(view.facts.trial, link.before, link.after) if leads else None,
        together=tuple(name for name in names if name != step.treatment.name),
    )
