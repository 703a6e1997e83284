"""What others compile beside the trial, from before its shapes are timed.

The shapes tell which layers are kept in BF16, and so what is put into one arm. Everything else is planned
without them: while the trial compiles the casts, others compile that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.prescription import hangs_on_shapes
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import BASELINES, ArmName
from fp8doctor.loading.job import Job
from fp8doctor.trial.arms import arms
from fp8doctor.trial.copies.depth import named_in
from fp8doctor.trial.copies.replica import NotReplicable, unwrapped
from fp8doctor.trial.measure.cuts import compiled_as_one, compiles
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.variant import ArmPlan, as_it_is


def is_for_others(plan: ArmPlan, job: Job, *, as_one: bool) -> bool:
    """Whether the arm may be compiled by others meanwhile. Blocks of what is built first are not, nor those
    of BF16 where the step before it compiles nothing: the trial comes to them before others can be ready."""
    if as_one and plan.name == ArmName.AS_IS:
        return True
    first = plan.name == ArmName.AS_IS or (plan.name in BASELINES and not compiles(job))
    return (plan.compiled or plan.fp8 is True) and (as_one or not first)


def begin(job: Job, facts: Facts, prescription: Sequence[Step], run: TrialRun) -> list[ArmPlan]:
    """Plan the arms without the shapes, have others begin with them, and return the plans.

    They begin with what is compiled block by block, and up to the first arm that hangs on the shapes: at work
    for a less important one they could not take it when it is known. Graphs of several blocks are compiled at
    cuts that are not known yet.
    """
    planned = arms(facts, prescription, job)
    run.ahead.know(facts)
    try:
        lists = named_in(unwrapped(job.model), [blocks.name for blocks in facts.network.blocks])
    except NotReplicable:  # which the conductor tells
        return planned
    if not compiled_as_one(job, lists):
        hanging = {step.treatment.name for step in prescription if hangs_on_shapes(step)}
        known = itertools.takewhile(lambda plan: hanging.isdisjoint(plan.treatments), planned)
        for_others = [
            (plan.name, 0)
            for plan in known
            if run.skipped(plan.name) is None and is_for_others(plan, job, as_one=False)
        ]
        run.ahead.begin(for_others, [None], more=True)
    return planned


def changed(before: Sequence[ArmPlan], now: Sequence[ArmPlan]) -> set[str]:
    """Name the arms of ``before`` that are planned otherwise now, or no more: itself or what it changes."""
    old, new = ({plan.name: plan for plan in planned} for planned in (before, now))
    return {name for name in old if list(_made_of(name, old)) != list(_made_of(name, new))}


def _made_of(name: str | None, plans: Mapping[str, ArmPlan]) -> Iterator[ArmPlan]:
    """Yield the arm, what it changes, and so on, without the functions, which do not compare: they follow
    from the rest, and from facts from before the trial."""
    while name is not None and name in plans:
        yield replace(plans[name], make=as_it_is, change=as_it_is, if_host_bound=())
        name = plans[name].base
