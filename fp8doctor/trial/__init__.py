"""The trial: the timed probe on copies of the user's model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import msgspec
import torch

from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, Trial, recorded
from fp8doctor.loading.job import Job
from fp8doctor.trial.arms import arms
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.layers import rows, shapes
from fp8doctor.trial.measure.device import DeviceLost, choose_device, gpu_name
from fp8doctor.trial.measure.profile_step import KeepTrace
from fp8doctor.trial.state import dynamo_state
from fp8doctor.trial.state.digest import CONTEXT, with_harm

__all__ = ["DeviceLost", "choose_device", "lost_with", "run_trial"]


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
    """Time the model's shapes, then the job as it is, both BF16 baselines and the prescription on ``device``
    within about ``budget_s`` seconds.

    ``progress`` is told what is being done, and with which arm. ``skip`` maps arms that are not to be built
    to the reason, for a trial that begins again after one took the process down. ``keep_trace`` is handed the
    trace of the step of every arm that is profiled, which is removed afterwards; ``keep`` is handed the trial
    as far as it is known, whenever a part begins that it can do without.

    Raises `DeviceLost` when an arm left the GPU unusable for this process, with what was known before where
    that is a trial, and nothing else for what the model does.
    """
    workers = dynamo_state.workers()
    current = (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    )  # events are of the current device
    try:
        with current:
            return _with_shapes(
                job, facts, prescription, device, budget_s, progress, skip or {}, keep_trace, keep
            )
    finally:
        dynamo_state.stop_new_workers(workers)


def lost_with(lost: DeviceLost, device: torch.device, budget_s: float) -> Trial:
    """The trial as the GPU's loss leaves it, for a process that goes on: what was known before, or the
    reason, and the harm."""
    nothing = Trial(
        device=device.type,
        gpu=gpu_name(device),
        blocks={},
        arms=(),
        self_check_ratio=None,
        reliable=False,
        why=lost.no_number.why,
        reason=f"{lost.arm}: {lost}",
        budget_s=budget_s,
    )
    return with_harm(lost.trial or nothing, (CONTEXT,))


def _with_shapes(
    job: Job,
    facts: Facts,
    prescription: Sequence[Step],
    device: torch.device,
    budget_s: float,
    progress: Callable[[str, str | None], None],
    skip: Mapping[str, str],
    keep_trace: KeepTrace | None,
    keep: Callable[[Trial], object],
) -> Trial:
    """The shapes first, because they say which layers to keep in BF16, then the arms, in what is left of the
    budget."""
    began = time.monotonic()
    until = began + shapes.SHARE * budget_s
    seen, unseen = rows.seen_beside(job, facts, device, progress=progress, reason_against=skip.get(rows.ARM))
    facts = msgspec.structs.replace(facts, trial=Trial(device=device.type, gpu=gpu_name(device), rows=seen))
    timed, gap = shapes.probe_beside(
        job, facts, device, until=until, progress=progress, reason_against=skip.get(shapes.ARM)
    )
    facts = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, shapes=timed))
    lists, spent = [blocks.name for blocks in facts.network.blocks], time.monotonic() - began
    planned = arms(facts, prescription, job)

    def whole(trial: Trial) -> Trial:
        gaps = {
            **(trial.gaps if recorded(trial, "gaps") else {}),
            **{fact: gap for fact, gap in (("trial.rows", unseen), ("trial.shapes", gap)) if gap},
        }
        return msgspec.structs.replace(trial, rows=seen, shapes=timed, gaps=gaps)

    try:
        trial = conduct(
            job,
            lists,
            planned,
            device,
            budget_s=budget_s,
            progress=progress,
            skip=skip,
            keep_trace=keep_trace,
            keep=lambda known: keep(whole(known)),
            spent_s=spent,
        )
    except DeviceLost as lost:
        lost.trial = whole(lost.trial) if lost.trial else None
        raise
    return whole(trial)
