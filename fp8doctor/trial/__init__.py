"""The trial: the timed probe on copies of the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Trial
from fp8doctor.job import Job
from fp8doctor.prescription import Step
from fp8doctor.trial.bench import DeviceLost
from fp8doctor.trial.conductor import conduct

__all__ = ["DeviceLost", "choose_device", "run_trial"]


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
) -> Trial:
    """Time the job as it is, both BF16 baselines and the prescription on ``device`` within about ``budget_s`` seconds.

    ``progress`` is told what is being done, and with which arm. ``skip`` maps arms that are not to be built to the
    reason, for a trial that begins again after one took the process down.

    Raises `DeviceLost` when an arm left the GPU unusable for this process, and nothing else for what the model does.
    """
    from fp8doctor.trial.arms import arms

    lists = [blocks.name for blocks in facts.network.blocks]
    return conduct(job, lists, arms(facts, prescription, job), device, budget_s=budget_s, progress=progress, skip=skip or {})
