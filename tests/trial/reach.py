"""A job whose replicas reach the user's model through an object that no copy can see through.

A replica misbehaves after its first step, which the guard refuses, so that it is the digest that has
to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8doctor.facts import Target, Trial, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.step import VariantPlan
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import as_it_is
from tests.trial.conducted import conduct

AFTER_THE_FIRST_STEP = 3
"""The forward at which a replica begins to misbehave: the guard's is the first."""


@dataclass(slots=True)
class Reach:
    """What a replica gets hold of; every copy is this very object."""

    deed: Callable[[Reach], object] | None = None
    at: int = AFTER_THE_FIRST_STEP
    forwards: int = 0
    model: Any = None
    optimizer: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Reach:
        return self

    def tick(self) -> None:
        self.forwards += 1
        if self.deed is not None and self.forwards == self.at:
            self.deed(self)


class Net(nn.Module):
    """Two layers, dropout and a buffer; ``helper`` is compiled by a graph break of its own."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self.reach = reach
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(16))
        self.notes: list[str] = ["kept"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reach.tick()
        return self.second(self.dropout(self.first(x).relu())) * self.scale


def mend(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def trained(deed: Callable[[Reach], object] | None = None, at: int = AFTER_THE_FIRST_STEP) -> Job:
    """A job in the middle of training: gradients, optimizer state, hooks, mixed flags."""
    reach = Reach()
    model = Net(reach)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    model.first.eval()
    model.first.bias.requires_grad_(False)
    model.second.register_forward_hook(lambda module, arguments, output: output)
    model.second.weight.register_hook(lambda gradient: gradient)
    model.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    reach.deed, reach.at, reach.forwards, reach.model, reach.optimizer = deed, at, 0, model, optimizer
    return Job(
        model=model,
        target=Target(),
        workload=Workload(accumulate=1),
        batch=torch.ones(4, 16),
        optimizer=optimizer,
    )


def attempt(job: Job, budget_s: float = 60) -> Trial:
    return conduct(job, [], [VariantPlan("as_is", as_it_is)], TrialRun(torch.device("cpu"), Budget(budget_s)))
