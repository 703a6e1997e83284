"""Lay out truncated models on the device, as deep as fit, with an optimizer each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.errors import UserError
from fp8doctor.examine.compile_marks import compile_mark, step_mark
from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import ClassCache
from fp8doctor.stacks.tensors import has_data, tensors
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import NotReplicable, replicate, unwrapped
from fp8doctor.trial.copies.shards import is_stand_in
from fp8doctor.trial.copies.step import WatchedSteps, move, optimizer_for, own_loss, training_step
from fp8doctor.trial.measure.evidence import executed
from fp8doctor.trial.measure.memory import is_roomy, leaves_room
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.snapshot import free
from fp8doctor.trial.treatments.forms import without_compile_marks
from fp8doctor.trial.variant import Variant


class Layout:
    """The truncated models on the device, each with its weights and optimizer state."""

    plan: depth.Plan
    """The plan that was laid out."""

    def __init__(self, job: Job, lists: Sequence[str], run: TrialRun, *, shallow: bool = False) -> None:
        """Plan the models; `lay_out` makes them. If ``shallow``, as for a graph of several blocks."""
        device = run.device
        self.run, self.device, self.job = run, device, replace(job, loss=own_loss(job.loss, device))
        self.guard = run.guard or Guard(job)
        there = all(has_data(each) or is_stand_in(each) for each in job.model.parameters())
        if job.rebuild is None and not there:
            raise NotReplicable("the model has no weights (meta device or fake tensors)")
        if not all(map(has_data, tensors(job.batch))):
            raise NotReplicable(
                "the batch has no data (meta device or fake tensors); "
                "give one, as example_batch() in a model file"
            )
        self.batch = move(job.batch, device)
        self.bases: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.recomputed: tuple[str, ...] = ()
        """The outermost modules that ran again in the backward of the first step."""
        root = unwrapped(job.model)
        within = depth.named_in(root, lists)
        self.as_one = compiled_as_one(job, within)
        """Whether one graph holds several blocks, so each depth is compiled again."""
        shallow |= self.as_one
        self._plans = depth.plans(root, within, as_one=shallow)
        self._deeper: list[depth.Plan] = []
        """Plans that are tried first if the GPU has memory for more than their steps."""
        if is_roomy(root, device):
            roomy = depth.plans(root, within, as_one=shallow, roomy=True)
            self._deeper = [plan for plan in roomy if plan not in self._plans]

    def lay_out(self, shallower: bool = False) -> bool:
        """Make the largest models that fit, or smaller ones in place of these, which must not be in use.

        False if there are no smaller ones: these stay. Raises `torch.OutOfMemoryError` if none fit.
        """
        plans = [*self._deeper, *self._plans]
        if shallower:
            plans = plans[plans.index(self.plan) + 1 :]
            if not plans:
                return False
            self.forget()
            free(self.device)
        if not any(map(self._laid_out, plans)):
            raise torch.OutOfMemoryError("the memory is too small for the smallest cuts")
        return True

    def _laid_out(self, plan: depth.Plan) -> bool:
        """Lay a plan out if it fits, and give back what it took if it does not.

        A deeper plan has to leave memory for variants that take more.
        """
        self.plan, deeper = plan, plan in self._deeper
        if deeper:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            for cut in plan.cuts:
                self._add(cut)
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = not deeper or leaves_room(self.device)
        if not fits:  # the error is gone here, and with it what it held of the step
            self.forget()
            free(self.device)
        return fits

    def forget(self) -> None:
        self.bases.clear()
        self.optimizers.clear()

    def _add(self, cut: depth.Cut) -> None:
        """Make one cut, in a frame of its own: after an error nothing may hold what does not fit."""
        job, base, memo = cut_of(self.job, cut, self.device)
        self.bases.append(base.train())
        self.optimizers.append(optimizer_for(job, base.parameters(), memo))
        self._first_step(cut)

    def _first_step(self, cut: depth.Cut) -> None:
        """Take one eager step, which makes the optimizer's state and shows what ran."""
        probe = without_compile_marks(self.variant(replicate(self.bases[-1], share=True)[0]))
        give_own_code(probe.model)
        with self.guard.armed(), executed(probe.model) as ran:
            step = training_step(self.job, probe, self.optimizers[-1], self.device)
            WatchedSteps(step, self.optimizers[-1])()
        lists = {each: probe.model.get_submodule(each) for each in map(cleaned, cut.kept)}
        blocks = [f"{name}.{child}" for name, held in lists.items() for child, _ in held.named_children()]
        missed = sum(not ran.within(cleaned(block)) for block in blocks)
        if missed:
            raise NotReplicable(f"a cut to {cut} blocks does not run all of them ({missed} are skipped)")
        self.recomputed = ran.recomputed()

    def variant(self, model: nn.Module) -> Variant:
        return Variant(model, self.batch, self.job.autocast, self.job.around)


def compiled_as_one(job: Job, lists: Sequence[str]) -> bool:
    """Return whether the step, a list of blocks or one of its parents is compiled."""
    return bool(lists) and (step_mark(job.training_step) is not None or one_graph(job.model, lists))


def one_graph(model: nn.Module, lists: Sequence[str]) -> bool:
    """Return whether a list of blocks or one of its parents is compiled."""
    marks = (
        compile_mark(module, "", ClassCache(type(module)))
        for name, module in model.named_modules()
        if not name or any(f"{cleaned(each)}.".startswith(f"{cleaned(name)}.") for each in lists)
    )
    return any(mark and mark.compiles is not False for mark in marks)


def cut_of(job: Job, cut: depth.Cut, device: torch.device) -> tuple[Job, nn.Module, Mapping[int, Any]]:
    """Truncate the model on the device, by the model file's function or by a copy.

    Returns the job that it belongs to, the truncated model, and the memo from that job's parameters to its
    own.
    """
    of, cuts = job, cut.kept
    if job.rebuild is not None and len(cut.kept) == 1:
        ((name, blocks),) = cut.kept.items()
        try:
            with device:
                model, optimizer = job.rebuild(blocks)
            depth.compare(unwrapped(job.model), unwrapped(model), name, blocks)
        except UserError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            if any(parameter.is_meta for parameter in job.model.parameters()):
                raise NotReplicable(
                    f"the model file's own cut to {blocks} blocks cannot be used: {error}"
                ) from error
        else:
            of, cuts = replace(job, model=model, optimizer=optimizer), {}
    here = of is not job and all(
        tensor.device == device for tensor in (*of.model.parameters(), *of.model.buffers())
    )
    if here:
        return of, of.model, {id(parameter): parameter for parameter in of.model.parameters()}
    return of, *replicate(of.model, device=device, cuts=cuts)
