"""Findings to a plan: which changes, in which order, as the trial timed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from fp8doctor import registry
from fp8doctor.analysis.arms import base_of
from fp8doctor.analysis.layer_gain import timed_shapes
from fp8doctor.analysis.module_names import has_lora
from fp8doctor.analysis.plan_end import PlanEnd
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import (
    COMPILE_LAYERS,
    CONVERT_BASE_FIRST,
    KEEP_IN_BF16,
    LARGER_BATCH,
    MORE_TOKENS,
    ON_THIS_GPU,
    STAY_IN_BF16,
)
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.areas import SEVERITIES
from fp8doctor.code_snippets import settings
from fp8doctor.diagnosis.conversion import starting, untold
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.expected_verdict import invalidates
from fp8doctor.diagnosis.giving_up import (
    changes_fp8,
    fixed_checks,
    giving_up,
    instead_of_fp8,
    while_in_fp8,
    without_what_it_undoes,
)
from fp8doctor.diagnosis.leaving_fp8 import replaces_own_compile
from fp8doctor.diagnosis.measured_savings import on_the_way
from fp8doctor.diagnosis.treatments import describe, keep_in_bf16
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import (
    ArmName,
)
from fp8doctor.finding import Finding, Saving, Treatment

FOR_FP8 = {MORE_TOKENS, LARGER_BATCH, "look-at-the-trace"}
"""Treatments that make FP8 pay, or find out why it does not: without a time no part of a plan in BF16."""


def prescribe(findings: Iterable[Finding], facts: Facts | None = None) -> tuple[Step, ...]:
    """Rank the treatments of ``findings``.

    Breakage comes first, then obstacles to FP8, then what makes the step another than it seems, then ms
    saved, then severity. To give FP8 up comes last: it
    is measured against FP8 with all other steps. A symptom whose cause was found as more than information is
    dropped, and so is information that saves nothing for sure. Findings with the same treatment become one
    step.
    """
    findings = tuple(findings)
    found = {finding.code for finding in findings if finding.severity != "info"}
    steps: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.treatment is None or found.intersection(finding.caused_by):
            continue
        if finding.severity == "info" and not _may_save(finding.saving_ms):
            continue
        steps.setdefault(finding.treatment.name, []).append(finding)
    ranked = sorted(steps.values(), key=_place)
    return tuple(_step_of(sorted(group, key=_rank), facts) for group in ranked)


def in_agreement(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Drop lines that set a variable differently from an earlier step."""
    said: dict[str, str | None] = {}
    kept = []
    for step in steps:
        lines = step.treatment.code.splitlines()
        agree = [line for line in lines if _agrees(line, said)]
        if len(agree) < len(lines):
            if all(line.lstrip().startswith("#") for line in agree):
                continue
            step = msgspec.structs.replace(
                step, treatment=msgspec.structs.replace(step.treatment, code="\n".join(agree))
            )
        for line in agree:
            said |= settings(line)
        kept.append(step)
    return tuple(kept)


def _agrees(line: str, said: Mapping[str, str | None]) -> bool:
    return all(name not in said or said[name] == value for name, value in settings(line).items())


def _may_save(saving: Saving | None) -> bool:
    """Return whether information promises milliseconds that its timing must confirm."""
    return saving is not None and (saving.low if saving.basis == "measured" else saving.high) > 0


def _place(group: list[Finding]) -> tuple[object, ...]:
    first = min(map(_rank, group))
    return *first[:3], not any(map(invalidates, group)), *first[3:]


def _rank(finding: Finding) -> tuple[bool, bool, bool, float, int, str]:
    gives_up = finding.treatment is not None and finding.treatment.name == STAY_IN_BF16
    blocks_fp8 = finding.severity == "error"
    saved = finding.saving_ms.middle if finding.saving_ms else 0.0
    severity = SEVERITIES.index(finding.severity or "info")
    return gives_up, not recorded(finding, "breaks"), not blocks_fp8, -saved, -severity, finding.code


def _step_of(group: list[Finding], facts: Facts | None) -> Step:
    worst = group[0]
    assert worst.treatment is not None
    return Step(
        code=worst.code,
        mends=tuple(dict.fromkeys(finding.code for finding in group)),
        names=tuple(finding.name for finding in group),
        title=worst.title,
        treatment=_for_all(worst.treatment, group, facts),
        saving_ms=worst.saving_ms,
    )


def _for_all(treatment: Treatment, group: list[Finding], facts: Facts | None) -> Treatment:
    """Return the treatment with the layers of every finding that names it."""
    layers = tuple(
        dict.fromkeys(layer for finding in group if finding.treatment for layer in finding.treatment.layers)
    )
    if set(layers) == set(treatment.layers):
        return treatment
    return (
        if_recorded(keep_in_bf16, layers, facts) or keep_in_bf16(layers)
        if treatment.name == KEEP_IN_BF16
        else msgspec.structs.replace(treatment, layers=layers)
    )


def as_timed(
    proposed: Sequence[Step], view: TrialView, broken: frozenset[str] = frozenset()
) -> tuple[Step, ...]:
    """Return the plan: the changes that lead to the best variant that a GPU timed, and what is open.

    Without such times the proposed steps stay, but never both a fix of FP8 and giving it up: if no FP8 layer
    can gain, giving it up comes first, and the others are dropped.
    """
    without_fp8 = set(ON_THIS_GPU.values())
    if any(step.treatment.name in without_fp8 and broken.intersection(step.names) for step in proposed):
        return tuple(step for step in proposed if step.treatment.name in without_fp8 or not changes_fp8(step))
    if view.end is not None:
        return _one_fix_of_a_layer(on_the_way(view, [*_to(view.end, proposed, view, broken)], broken))
    gives_up = [step for step in proposed if step.treatment.name == STAY_IN_BF16]
    if view.on_gpu:
        others = [step for step in proposed if step.treatment.name != STAY_IN_BF16]
        return (*others, *([] if any(map(changes_fp8, others)) else gives_up))
    steps = _by_the_filter(
        {step.treatment.name: step for step in while_in_fp8(proposed, view.facts)}, view.facts
    )
    gives_up = [step for step in steps if step.treatment.name == STAY_IN_BF16]
    others = [step for step in steps if step.treatment.name != STAY_IN_BF16]
    if gives_up:
        return instead_of_fp8(others, gives_up[0], broken)
    mends = [step for step in others if broken.intersection(step.names)]
    return (*mends, *(step for step in others if step not in mends))


def _one_fix_of_a_layer(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Say that a layer that one step compiles and another keeps in BF16 stays compiled, as it was timed."""
    compiled = {
        name for step in steps if step.treatment.name == COMPILE_LAYERS for name in step.treatment.layers
    }
    return tuple(
        msgspec.structs.replace(step, treatment=_kept_compiled(step.treatment))
        if step.treatment.name == KEEP_IN_BF16 and compiled.intersection(step.treatment.layers)
        else step
        for step in steps
    )


def _kept_compiled(treatment: Treatment) -> Treatment:
    return msgspec.structs.replace(treatment, summary=f"{treatment.summary}, and keep it compiled, in BF16")


def _to(end: PlanEnd, proposed: Sequence[Step], view: TrialView, broken: frozenset[str]) -> Iterator[Step]:
    """List breakage first, then the changes that make the variant, then what no variant tried.

    What was timed and is no part of it is dropped, unless it is about more than speed.
    """
    settled = _settled(view)
    kept = [
        step
        for step in proposed
        if step.treatment.name != STAY_IN_BF16
        and (
            step.treatment.name in end.changes
            or broken.intersection(step.names)
            or _is_about_accuracy(step)
            or step.treatment.name not in (settled | (FOR_FP8 if view.gives_up_fp8 else set()))
        )
    ]
    first: list[Step] = []
    in_vain = (
        view.most is not None
        and view.most.speedup < 1 + EVEN
        and end.in_bf16
        and any(_enables_fp8(step, view) for step in kept)
    )
    if view.gives_up_fp8 or in_vain:
        recompiles = replaces_own_compile(end.arm, view.facts)
        kept, gives_up = without_what_it_undoes(kept, giving_up(end, proposed, view), broken, recompiles)
        first = [gives_up]
    elif not view.uses_fp8 and not end.is_as_is:
        first = starting(end, view)
    mends = [step for step in kept if broken.intersection(step.names) or _enables_fp8(step, view)]
    named = {step.treatment.name for step in (*kept, *first)}
    found = [_found_by_trial(name, view) for name in end.changes if name not in named]
    parts = [step for step in kept if step.treatment.name in end.changes and step not in mends]
    rest = [step for step in kept if step not in mends and step not in parts]
    yield from (*mends, *first, *parts, *filter(None, found), *rest)


def _settled(view: TrialView) -> set[str]:
    """Name the treatments that were timed, or need too much memory, alone or together.

    If the plan leaves FP8 off, those that help BF16 too count only if they were timed in BF16.
    """
    trial = view.facts.trial
    timed = {
        name
        for each in trial.arms
        if each.tried and recorded(each, "treatments") and base_of(trial, each)
        for name in each.treatments
    }
    return (timed - view.open_in_bf16) | set(if_recorded(_too_large_together, view) or ())


def _enables_fp8(step: Step, view: TrialView) -> bool:
    """Return whether FP8 was asked for, did not begin, and would by this step."""
    return not view.uses_fp8 and changes_fp8(step)


def _is_about_accuracy(step: Step) -> bool:
    return any(check.area == "numerics" for check in fixed_checks(step))


def _by_the_filter(planned: dict[str, Step], facts: Facts) -> list[Step]:
    """Drop the steps that another step's filter carries out.

    Those compile FP8 layers that it leaves out, or leave LoRA's matrices out. It fixes their findings too,
    and saves what the largest of them does.
    """
    filters = planned.get(KEEP_IN_BF16)
    if filters is None:
        return list(planned.values())
    compiles, converts = planned.get(COMPILE_LAYERS), planned.get(CONVERT_BASE_FIRST)
    held = [
        *([compiles] if compiles and _holds(filters.treatment, compiles.treatment) else []),
        *([converts] if converts and has_lora(facts.linears()) else []),
    ]
    savings = [each.saving_ms for each in (filters, *held) if each.saving_ms]
    planned[KEEP_IN_BF16] = msgspec.structs.replace(
        filters,
        mends=tuple(dict.fromkeys(code for each in (filters, *held) for code in each.mends)),
        names=tuple(dict.fromkeys(name for each in (filters, *held) for name in each.names)),
        saving_ms=max(savings, key=lambda saving: saving.middle, default=None),
    )
    return [each for each in planned.values() if each not in held]


def _holds(treatment: Treatment, other: Treatment) -> bool:
    """Return whether a treatment changes all layers that another changes."""
    return bool(other.layers) and {*treatment.layers}.issuperset(other.layers)


def with_timed_shapes(prescription: Sequence[Step], facts: Facts) -> list[Treatment]:
    """Return the proposed treatments, those about shapes as these were timed."""
    treatments = []
    for step in prescription:
        treatment: Treatment | None = step.treatment
        if depends_on_shapes(step) and timed_shapes(facts):
            treatment = if_recorded(describe, KEEP_IN_BF16, facts)
        if treatment is not None:
            treatments.append(treatment)
    return treatments


def depends_on_shapes(step: Step) -> bool:
    """Return whether timed shapes decide which layers this step keeps in BF16."""
    about_shapes = {check.name for check in registry.discover() if check.about_shapes}
    return step.treatment.name == KEEP_IN_BF16 and about_shapes.issuperset(step.names)


def _too_large_together(view: TrialView) -> tuple[str, ...]:
    """Name the treatments that take more memory than there is, all together."""
    every = (each for each in view.facts.trial.arms if each.name == ArmName.PRESCRIBED)
    return next((each.treatments for each in every if each.treatments in view.too_large), ())


def _found_by_trial(name: str, view: TrialView) -> Step | None:
    """Find a treatment of the total that no finding names."""
    treatment, saved = describe(name, view.facts), view.savings.get(name)
    if treatment is None:
        return None
    faster = "is faster, timed with all else equal"
    alone = saved is not None and saved.low > 0
    title = f"{name} {faster if alone else 'is a part of the fastest step that was timed'}"
    return untold(title, treatment)
