"""Facts of a real job with a real trial on the CPU, of a few of its arms only."""

from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import plan_variants
from tests.trial.conducted import conduct


def tried(model: nn.Module, batch: Any, *names: str, **fields: Any) -> Facts:
    """The facts of the job with the named arms timed, in as few rounds as there can be."""
    workload = Workload(
        batch_source="given",
        tokens=64,
        loss_source="mean",
        optimizer_source="made up",
        autocast_source="none",
        accumulate=1,
    )
    job = Job(
        model=model,
        target=Target(kind="live", name=type(model).__name__),
        workload=workload,
        batch=batch,
        **fields,
    )
    facts = examine(job)
    planned = {plan.name: plan for plan in plan_variants(facts, (), job)}
    plans = [planned[name] for name in names]
    most, timer.MOST_ROUNDS = timer.MOST_ROUNDS, timer.LEAST_ROUNDS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trial = conduct(
            job,
            [blocks.name for blocks in facts.network.blocks],
            plans,
            TrialRun(torch.device("cpu"), Budget(600)),
        )
    finally:
        timer.MOST_ROUNDS = most
        torch.set_num_threads(threads)
    return replace(facts, trial=trial)
