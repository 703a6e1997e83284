"""The trial: time variants of the training step on copies of the user's model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from msgspec import structs
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import is_a, is_torchscript, modules_of, tensors_of
from fp8doctor.stages import Doing, Stage, Teller
from fp8doctor.trial.conductor import left_alone, timed
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.copies.unsharded import unsharded
from fp8doctor.trial.layers import rows, shapes
from fp8doctor.trial.layers.fake_forward import with_forward
from fp8doctor.trial.layers.seen_calls import without_forward, without_seen
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import DeviceLost, TrialRun, choose_device
from fp8doctor.trial.planning import plan_variants
from fp8doctor.trial.state.settings import CONTEXT, with_harm

__all__ = ["Budget", "DeviceLost", "TrialRun", "time_copies", "with_forward", "without_forward"]


def time_copies(
    job: Job,
    facts: Facts,
    device: str | None,
    propose: Callable[[Facts], Sequence[Step]],
    budget: Budget,
    tell: Callable[[Doing, str | None], object],
    *,
    before: int = 0,
    keep: Callable[[Facts], object] = lambda known: None,
    **settings: Any,
) -> Facts | None:
    """Watch a forward of a copy, time the shapes, then the variants; add that to the facts.

    None if there is no device for it. What the model raises becomes a reason. ``propose`` receives the facts
    with what the forward showed, and returns the steps to time. ``tell`` receives each activity and its
    variant, ``keep`` the facts with the trial so far. ``before`` counts the stages before the trial;
    ``settings`` are other fields of the `TrialRun`.

    Raises `DeviceLost` in a process of the trial's own, and `UserError` for a device that is not here.
    """
    where = choose_device(device)
    if where is None:
        return None
    teller = Teller(tell, budget.end, before=before)
    latest: list[Trial] = []

    def known(trial: Trial) -> Facts:
        latest[:] = [trial]
        return structs.replace(facts, trial=trial)

    run = TrialRun(
        where,
        budget,
        teller.say,
        keep=lambda trial: keep(known(trial)),
        begin=teller.begin,
        **settings,
    )
    try:
        _refuse_unready(job)
        job = unsharded(job)
    except NotReplicable as error:
        facts = without_seen(facts, str(error))
        return known(run.without_times(NoNumber(Reason.NOT_REPLICABLE, str(error))))
    no_time = budget.left_out(Reason.NO_TIME_LEFT)
    run.keep(run.without_times(no_time))  # of a child that is ended from here on
    run.begin(Stage.SHAPES)
    current = torch.cuda.device(where) if where.type == "cuda" else nullcontext()
    try:
        with current, left_alone(job, run) as (guarded, changed):  # events are of the current device
            now = time.monotonic()
            facts, seen, unseen = rows.watch_copy(job, facts, guarded)
            prescription = propose(facts)
            until = now + shapes.SHARE * (budget.end - now)
            with_rows = known(replace(guarded, known={"rows": seen}).trial())
            timed_shapes, untimed = shapes.time_shapes(with_rows, guarded, until)
            gaps = {"trial.rows": unseen, "trial.shapes": untimed}
            missing = {fact: gap for fact, gap in gaps.items() if gap}
            guarded = replace(guarded, known={"rows": seen, "shapes": timed_shapes, "gaps": missing})
            planned = plan_variants(known(guarded.trial()), prescription, job)
            guarded.keep(guarded.without_times(no_time))
            trial = timed(job, [blocks.name for blocks in facts.network.blocks], planned, guarded)
            guarded.keep(trial)
    except DeviceLost as lost:
        if run.own_process:
            raise
        if not any(arm.tried for arm in latest[0].get("arms", ())):
            lost_it = NoNumber(Reason.TOOK_PROCESS_DOWN, f"{lost.arm}: {lost}")
            known(run.without_times(lost_it))
        return known(with_harm(latest[0], (CONTEXT,)))
    return known(with_harm(trial, changed))


def _refuse_unready(job: Job) -> None:
    """Raise `NotReplicable` for a part of ``torch.jit``, or a lazy module that has not run yet."""
    for name, module in modules_of(job.model):
        if is_torchscript(type(module)):
            raise NotReplicable(
                f"its part {name or type(module).__name__} is compiled by torch.jit, which takes no hooks "
                "and no FP8 layers: give fp8doctor the model without torch.jit"
            )
    for name, tensor in chain(tensors_of(job.model, "_parameters"), tensors_of(job.model, "_buffers")):
        if is_a(tensor, UninitializedParameter) or is_a(tensor, UninitializedBuffer):
            raise NotReplicable(
                f"its parameter {name} has no size before a batch has gone through the lazy module that "
                "holds it: run the model once on a batch, as in build_model(), before fp8doctor looks at it"
            )
