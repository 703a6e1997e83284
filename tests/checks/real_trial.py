"""A real trial of a few chosen arms on the CPU, and the facts with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.job import Job
from fp8doctor.trial import timer
from fp8doctor.trial.arms import Of
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.variant import ArmPlan, as_it_is

AS_IS = ArmPlan("as_is", as_it_is)


def tried(
    model: nn.Module, batch: torch.Tensor | Mapping[str, torch.Tensor], choose: Callable[[Of, ArmPlan], list[ArmPlan]], patch: pytest.MonkeyPatch
) -> Facts:
    """Facts of the model with the step as it is and the arms that ``choose`` makes of it, timed as few times as there may be."""
    patch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)
    job = Job(model=model, target=Target(kind="live"), workload=Workload(batch_source="given", tokens=64, loss_source="mean", accumulate=1), batch=batch)
    facts = examine(job)
    trial = conduct(job, [], [AS_IS, *choose(Of(facts, job), AS_IS)], torch.device("cpu"), budget_s=600.0, progress=lambda text, arm: None)
    return msgspec.structs.replace(facts, trial=trial)
