"""The trial: the timed probe on copies of the user's model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import msgspec
import torch

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Trial, recorded
from fp8doctor.job import Job
from fp8doctor.prescription import Step
from fp8doctor.trial import dynamo_state
from fp8doctor.trial.bench import DeviceLost
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.digest import CONTEXT, with_harm
from fp8doctor.trial.results import gpu_name
from fp8doctor.trial.trace import KeepTrace

__all__ = ["DeviceLost", "choose_device", "lost_with", "run_trial"]


def choose_device(name: str | None) -> torch.device | None:
    """The device to time on: the named one, else the current CUDA device, else None.

    Raises `UserError` for a name that is no device here.
    """
    if name is not None:
        return _named(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device; write cuda, cuda:1 or cpu") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(f"{name!r} cannot be timed on; write cuda, cuda:1 or cpu")
    if not torch.cuda.is_available():
        raise UserError(f"{name!r} was asked for, and torch sees no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UserError(f"{name!r} was asked for, and torch sees {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index)


def run_trial(
    job: Job,
    facts: Facts,
    prescription: Sequence[Step],
    device: torch.device,
    *,
    budget_s: float,
    progress: Callable[[str, str | None], None],
    skip: Mapping[str, str] | None = None,
    keep_trace: KeepTrace | None = None,
    keep: Callable[[Trial], object] = lambda trial: None,
) -> Trial:
    """Time the model's shapes, then the job as it is, both BF16 baselines and the prescription on ``device`` within about ``budget_s`` seconds.

    ``progress`` is told what is being done, and with which arm. ``skip`` maps arms that are not to be built to the
    reason, for a trial that begins again after one took the process down. ``keep_trace`` is handed the trace of the step of every
    arm that is profiled, which is removed afterwards; ``keep`` is handed the trial as far as it is known, whenever a part begins
    that it can do without.

    Raises `DeviceLost` when an arm left the GPU unusable for this process, with what was known before where that is a trial,
    and nothing else for what the model does.
    """
    workers = dynamo_state.workers()
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # events are of the current device
    try:
        with current:
            return _with_shapes(job, facts, prescription, device, budget_s, progress, skip or {}, keep_trace, keep)
    finally:
        dynamo_state.stop_new_workers(workers)


def lost_with(lost: DeviceLost, device: torch.device, budget_s: float) -> Trial:
    """The trial as the GPU's loss leaves it, for a process that goes on: what was known before, or the reason, and the harm."""
    reason = f"{lost.arm}: {lost}"
    nothing = Trial(device=device.type, gpu=gpu_name(device), blocks={}, arms=(), self_check_ratio=None, reliable=False, reason=reason, budget_s=budget_s)
    return with_harm(lost.trial or nothing, (CONTEXT,))


def _with_shapes(
    job: Job, facts: Facts, prescription: Sequence[Step], device: torch.device, budget_s: float,
    progress: Callable[[str, str | None], None], skip: Mapping[str, str], keep_trace: KeepTrace | None, keep: Callable[[Trial], object],
) -> Trial:  # fmt: skip
    """The shapes first, because they say which layers to keep in BF16, then the arms, in what is left of the budget."""
    from fp8doctor.trial import rows, shapes
    from fp8doctor.trial.arms import arms

    began = time.monotonic()
    until = began + shapes.SHARE * budget_s
    seen, unseen = rows.seen_beside(job, facts, device, progress=progress, reason_against=skip.get(rows.ARM))
    facts = msgspec.structs.replace(facts, trial=Trial(device=device.type, gpu=gpu_name(device), rows=seen))
    timed, gap = shapes.probe_beside(job, facts, device, until=until, progress=progress, reason_against=skip.get(shapes.ARM))
    facts = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, shapes=timed))
    lists, spent = [blocks.name for blocks in facts.network.blocks], time.monotonic() - began
    planned = arms(facts, prescription, job)

    def whole(trial: Trial) -> Trial:
        gaps = {**(trial.gaps if recorded(trial.gaps) else {}), **{fact: gap for fact, gap in (("trial.rows", unseen), ("trial.shapes", gap)) if gap}}
        return msgspec.structs.replace(trial, rows=seen, shapes=timed, gaps=gaps)

    try:
        trial = conduct(
            job, lists, planned, device, budget_s=budget_s, progress=progress, skip=skip, keep_trace=keep_trace,
            keep=lambda known: keep(whole(known)), spent_s=spent,
        )  # fmt: skip
    except DeviceLost as lost:
        lost.trial = whole(lost.trial) if lost.trial else None
        raise
    return whole(trial)
