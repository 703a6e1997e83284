"""The trial: the timed probe on copies of the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fp8doctor.facts import Facts, Trial
from fp8doctor.job import Job
from fp8doctor.prescription import Step


def choose_device(name: str | None) -> torch.device | None:
    """The device to time on: the named one, else the current CUDA device, else None."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def run_trial(
    job: Job,
    facts: Facts,
    prescription: Sequence[Step],
    device: torch.device,
    *,
    budget_s: float,
    progress: Callable[[str], None],
    skip: Mapping[str, str] | None = None,
) -> Trial:
    """Time the job as it is, both BF16 baselines and the prescription on ``device`` within about ``budget_s`` seconds.

    ``skip`` maps arms that are not to be built to the reason, for a trial that begins again after one took the process
    down. Never raises for what the model does.
    """
    from fp8doctor.trial.arms import arms
    from fp8doctor.trial.conduct import conduct

    lists = [blocks.name for blocks in facts.network.blocks]
    return conduct(job, lists, arms(facts, prescription), device, budget_s=budget_s, progress=progress, skip=skip or {})
