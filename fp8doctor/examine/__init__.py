"""Examining: the live world read once into facts. Nothing here imports torch before it is called."""

from __future__ import annotations

import msgspec

from fp8doctor.facts import Facts, Target, recorded
from fp8doctor.job import Job


def examine_surroundings(target: Target) -> Facts:
    """Software, environment variables and GPUs: what can be known without a model."""
    from fp8doctor.examine.device import examine_gpus
    from fp8doctor.examine.environment import examine_environment

    gaps: dict[str, str] = {}
    software, environment = examine_environment(gaps)
    gpus = examine_gpus(gaps)
    return Facts(target=target, software=software, environment=environment, gpus=gpus, gaps=gaps)


def examine(job: Job, surroundings: Facts | None = None) -> Facts:
    """Everything about a job; ``surroundings`` is what `examine_surroundings` gave, if that was already asked."""
    from fp8doctor.examine.network import examine_network
    from fp8doctor.examine.training import examine_training
    from fp8doctor.examine.walk import walk

    facts = surroundings or examine_surroundings(job.target)
    gaps = dict(facts.gaps) if recorded(facts.gaps) else {}
    tree = walk(job.model, job.training_step)
    network = examine_network(tree, gaps)
    training = examine_training(tree, job, gaps)
    return msgspec.structs.replace(facts, target=job.target, network=network, training=training, workload=job.workload, gaps=gaps)
