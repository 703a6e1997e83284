"""The step that leaves FP8 off: as timed, as proposed, or as estimated; and the steps that it undoes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.analysis.losing_layers import crossing
from fp8doctor.analysis.modelled_host import modelled_host_bound
from fp8doctor.analysis.modelled_speedup import ModelledSpeedup, to_convert
from fp8doctor.analysis.plan_end import PlanEnd
from fp8doctor.analysis.treatment_table import (
    KEEP_IN_BF16,
    MORE_TOKENS,
    OPTIMIZER_LAST,
    STAY_IN_BF16,
    traits,
)
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.step_cost import in_bf16, with_tokens
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.expected_verdict import expected_speedup
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.finding import Finding, Treatment

COMPILATION = "compilation"
"""A family of treatments, and the area of the checks of torch.compile."""

COMPILE = ".compile("
"""In the code of a fix that compiles."""

CONVERTS = "convert"
"""First words of treatments after which other layers may be in FP8."""


def as_estimated(
    steps: Sequence[Step], view: TrialView, findings: Sequence[Finding], broken: frozenset[str]
) -> tuple[Step, ...]:
    """Leave FP8 off if no GPU compared it with BF16, and it loses with the whole plan by the cost model.

    The steps stay if the job neither holds FP8 nor asks for it.
    """
    facts = view.facts
    if view.on_gpu and view.bf16:
        return tuple(steps)
    expects = planned_speedup(facts, findings, steps)
    if stays_in_bf16(steps) or expects is None or not expects.loses:
        return tuple(steps)
    if not (uses_fp8(facts) or fp8_was_asked_for(facts) or any(map(changes_fp8, steps))):
        return tuple(steps)
    treatment = stay_in_bf16(facts, "FP8 would be slower here (estimated)")
    title = f"FP8 would run at {expects.best:.2f}x the speed of BF16 (estimated for {expects.gpu})"
    gives_up = Step(code="", mends=(), title=title, treatment=treatment)
    return instead_of_fp8(steps, gives_up, broken)


def unless_undecided(
    proposed: Sequence[Step], view: TrialView, findings: Sequence[Finding]
) -> tuple[Step, ...]:
    """Drop giving FP8 up if nothing compared it with BF16, and the estimate of the other fixes holds 1."""
    others = tuple(step for step in proposed if step.treatment.name != STAY_IN_BF16)
    if len(others) == len(proposed) or (view.on_gpu and view.bf16):
        return tuple(proposed)
    expects = if_recorded(planned_speedup, view.facts, findings, others)
    return others if expects and not expects.loses and uses_fp8(view.facts) else tuple(proposed)


def stays_in_bf16(steps: Iterable[Step]) -> bool:
    """Return whether the plan leaves FP8 off."""
    return any(step.treatment.name == STAY_IN_BF16 for step in steps)


def instead_of_fp8(others: Sequence[Step], gives_up: Step, broken: frozenset[str]) -> tuple[Step, ...]:
    """Put giving FP8 up in the place of what it makes pointless, behind what BF16 needs too.

    Breakage that it ends heads it, or else, if no finding proposed it, the first that it makes pointless.
    """
    undone = [
        step
        for step in others
        if changes_fp8_alone(step)
        or (not broken.intersection(step.names) and (changes_fp8(step) or _recompiles(step)))
    ]
    worst = [step for step in undone if broken.intersection(step.names)]
    heads = worst or (undone if not gives_up.code else [])
    for head in heads[:1]:
        gives_up = msgspec.structs.replace(gives_up, code=head.code, title=head.title, names=head.names[:1])
    kept = [step for step in others if step not in undone]
    mends = [step for step in kept if broken.intersection(step.names)]
    gives_up = mending_too(gives_up, filter(changes_fp8_alone, undone))
    return (*mends, gives_up, *(step for step in kept if step not in mends))


def planned_speedup(
    facts: Facts, findings: Iterable[Finding], steps: Sequence[Step]
) -> ModelledSpeedup | None:
    """Model the step with the tokens and the layers in BF16 that the plan asks for; None if it is unknown."""
    more = if_recorded(_with_more_tokens, facts, steps)
    facts = more or facts
    kept = {name for step in steps if step.treatment.name == KEEP_IN_BF16 for name in step.treatment.layers}
    fewer = in_bf16(facts, kept) if kept else facts
    of = fewer if fewer.network.fp8 else facts
    found = expected_speedup(of, findings, as_it_ran=not (more or kept))
    return None if found and not found.loses and leaves_uncompiled(found, facts, steps) else found


def leaves_uncompiled(found: ModelledSpeedup, facts: Facts, steps: Sequence[Step]) -> bool:
    """Return whether the plan brings FP8 that it does not compile: the model is of compiled layers alone."""
    compiles = any(traits(step.treatment.name).compiles or COMPILE in step.treatment.code for step in steps)
    if not found.recipes or compiles or not any(map(changes_fp8, steps)):
        return False
    return any(each.compiled is None for each in to_convert(facts))


def _with_more_tokens(facts: Facts, steps: Sequence[Step]) -> Facts | None:
    """Give the job the tokens that the plan asks for; None if it asks for no number."""
    if not any(step.treatment.name == MORE_TOKENS for step in steps):
        return None
    found, bound = crossing(facts), if_recorded(modelled_host_bound, facts)
    tokens = max(found.tokens if found else 0, (bound.pays_from or 0) if bound else 0)
    return with_tokens(facts, tokens) if tokens else None


def mending_too(step: Step, undone: Iterable[Step]) -> Step:
    """Let a step fix what the steps that it undoes were for."""
    every = (step, *undone)
    mends = dict.fromkeys(code for each in every for code in each.mends)
    names = dict.fromkeys(name for each in every for name in each.names)
    return msgspec.structs.replace(step, mends=tuple(mends), names=tuple(names))


def giving_up(end: PlanEnd, proposed: Sequence[Step], view: TrialView) -> Step:
    """Write the step that leaves FP8 off, with the finding that proposed it if there is one."""
    asked = next((step for step in proposed if step.treatment.name == STAY_IN_BF16), None)
    return Step(
        code=asked.code if asked else "",
        mends=asked.mends if asked else (),
        names=asked.names if asked else (),
        title=asked.title
        if asked
        else "FP8 stays slower than BF16 with everything that was tried"
        if view.all_fp8_loses
        else "No FP8 that was timed is faster than BF16 for sure",
        treatment=stay_in_bf16(view.facts, for_now=view.fp8_is_undecided),
    )


def without_what_it_undoes(
    others: Sequence[Step], gives_up: Step, broken: frozenset[str], recompiles: bool
) -> tuple[list[Step], Step]:
    """Drop steps that giving FP8 up undoes: changes of FP8 and other ways to compile.

    It says how BF16 is compiled, and fixes all their findings. Breakage that is not of FP8 alone stays.
    """
    undone = [
        step
        for step in others
        if changes_fp8_alone(step) or (not broken.intersection(step.names) and _is_undone(step, recompiles))
    ]
    return [step for step in others if step not in undone], mending_too(gives_up, undone)


def _is_undone(step: Step, recompiles: bool) -> bool:
    """Return whether this step is pointless in BF16, compiled as the last step says."""
    name = step.treatment.name
    if _recompiles(step):
        return True
    if traits(name).helps_bf16_too:
        return False
    if recompiles and any(check.area == COMPILATION for check in fixed_checks(step)):
        return True
    return changes_fp8_alone(step) or traits(name).recipe is not None


def _recompiles(step: Step) -> bool:
    """Return whether it says how to compile, as the step that leaves FP8 off does."""
    return traits(step.treatment.name).family == COMPILATION


def while_in_fp8(steps: Sequence[Step], facts: Facts) -> list[Step]:
    """Drop FP8-only changes if the filter leaves no layer in FP8, and none is new.

    If giving FP8 up is planned too, it says the same in fewer words.
    """
    named = {step.treatment.name: step for step in steps}
    filters = named.get(KEEP_IN_BF16)
    converts = any(name.startswith(CONVERTS) for name in named)
    if filters is None or converts or not if_recorded(_leaves_none, filters.treatment, facts):
        return list(steps)
    instead = named.get(STAY_IN_BF16)
    stays = instead or _of_none(filters)
    moot = [step for step in steps if step is not instead and (step is filters or changes_fp8_alone(step))]
    stays = mending_too(stays, moot)
    by = instead or filters
    return [stays if step is by else step for step in steps if step is by or step not in moot]


def _leaves_none(filters: Treatment, facts: Facts) -> bool:
    """Return whether it leaves out all FP8 layers, of which there are some."""
    in_fp8 = {linear.name for linear in facts.network.linears if linear.use == "training"}
    return bool(in_fp8) and in_fp8.issubset(filters.layers)


def _of_none(filters: Step) -> Step:
    summary = f"{filters.treatment.summary}, which leaves none in FP8"
    return msgspec.structs.replace(
        filters, treatment=msgspec.structs.replace(filters.treatment, summary=summary)
    )


def stops_first(facts: Facts, findings: Iterable[Finding]) -> bool:
    """Return whether the job ends before a step, so that nothing is faster than it is now."""
    checks = (registry.check_of(each) for each in findings if each.severity == "error")
    return any(each and each.stops_before_a_step for each in checks) and not uses_fp8(facts)


def begins_fp8(steps: Iterable[Step], planned: ModelledSpeedup) -> bool:
    """Return whether a model without FP8 trains in it with the plan."""
    steps = tuple(steps)
    return any(map(converts, steps)) or (not planned.loses and any(map(changes_fp8, steps)))


def converts(step: Step) -> bool:
    return traits(step.treatment.name).family == CONVERTS


def is_modelled(step: Step) -> bool:
    """Return whether the model of a fixed FP8 step holds what this step changes."""
    return traits(step.treatment.name).compiles or changes_fp8(step) or converts(step)


def changes_fp8(step: Step) -> bool:
    """Return whether it changes how FP8 runs: before that, no time decides about FP8."""
    return any(check.changes_fp8 for check in fixed_checks(step))


def changes_fp8_alone(step: Step) -> bool:
    """Return whether nothing is left for it to fix once FP8 is off."""
    stays = step.treatment.name == OPTIMIZER_LAST or any(each.stays_in_bf16 for each in fixed_checks(step))
    return changes_fp8(step) and not stays


def fixed_checks(step: Step) -> list[registry.Check]:
    return [check for check in registry.discover() if check.name in step.names]
