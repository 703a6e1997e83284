"""Cuts on the device, and whether a graph of several blocks is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.errors import UserError
from fp8doctor.examine.compile_marks import compile_mark, step_mark
from fp8doctor.examine.kind import Kind
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import NotReplicable, replicate, unwrapped


def compiled_as_one(job: Job, lists: Sequence[str]) -> bool:
    """Whether the step, a list of blocks or what holds one is compiled."""
    return bool(lists) and (step_mark(job.training_step) is not None or one_graph(job.model, lists))


def one_graph(model: nn.Module, lists: Sequence[str]) -> bool:
    """Whether a list of blocks or what holds one is compiled in the model."""
    return _any_compiles(
        module
        for name, module in model.named_modules()
        if not name or any(f"{cleaned(each)}.".startswith(f"{cleaned(name)}.") for each in lists)
    )


def _any_compiles(modules: Iterable[nn.Module]) -> bool:
    marks = (compile_mark(module, "", Kind(type(module))) for module in modules)
    return any(mark and mark.compiles is not False for mark in marks)


def cut_of(job: Job, cut: depth.Cut, device: torch.device) -> tuple[Job, nn.Module, Mapping[int, Any]]:
    """Make a cut on the device: by the model file's own function where it can, else by copying the model.

    With it come the job that it belongs to and the memo from that job's parameters to the cut's.
    """
    of, cuts = job, dict(cut.indices)
    if job.rebuild is not None and len(cut.kept) == 1:
        ((name, blocks),) = cut.kept.items()
        try:
            with device:
                model, optimizer = job.rebuild(blocks)
            depth.compare(unwrapped(job.model), unwrapped(model), name, blocks)
        except (UserError, depth.NotTheCut) as error:
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
