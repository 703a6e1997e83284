"""Examine the live world once, into facts. Nothing here imports torch at the top."""

import msgspec

from fp8doctor.facts import Facts, Target
from fp8doctor.loading.job import Job


def examine_surroundings(target: Target) -> Facts:
    """Examine software, variables and GPUs: everything except a model."""
    from fp8doctor.examine.environment import examine_environment
    from fp8doctor.examine.nvml_gpus import examine_gpus

    gaps: dict[str, str] = {}
    software, environment = examine_environment(gaps)
    gpus, driver = examine_gpus(gaps)
    software = msgspec.structs.replace(software, driver=driver)
    return Facts(target=target, software=software, environment=environment, gpus=gpus, gaps=gaps)


def examine(job: Job) -> Facts:
    from fp8doctor.examine.attention import examine_attention
    from fp8doctor.examine.distributed import examine_distributed
    from fp8doctor.examine.linears import examine_scaling
    from fp8doctor.examine.module_facts import examine_network
    from fp8doctor.examine.training_state import examine_training, with_recipe_of_the_step
    from fp8doctor.examine.walk import walk

    facts = examine_surroundings(job.target)
    gaps = dict(facts.gaps)
    marks = {"unused_marks": job.unused_marks, "in_a_function": job.in_a_function}
    tree = walk(job.model, job.training_step, **marks)
    network = msgspec.structs.replace(
        with_recipe_of_the_step(examine_network(tree, gaps), tree, job),
        scalings=examine_scaling(tree),
        attentions=examine_attention(tree),
    )
    training = msgspec.structs.replace(
        examine_training(tree, job, gaps), distributed=examine_distributed(tree)
    )
    return msgspec.structs.replace(
        facts,
        target=job.target,
        network=network,
        training=training,
        workload=job.workload,
        gaps=gaps,
    )
