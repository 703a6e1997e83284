"""Examine the live world once, into facts. Nothing here imports torch at the top."""

from msgspec.structs import replace

from fp8doctor.facts import Facts, Target
from fp8doctor.loading.job import Job


def examine_surroundings(target: Target) -> Facts:
    """Examine software, variables and GPUs: everything except a model."""
    from fp8doctor.examine.environment import examine_environment
    from fp8doctor.examine.nvml_gpus import examine_gpus

    gaps: dict[str, str] = {}
    software, environment = examine_environment(gaps)
    gpus, driver = examine_gpus(gaps)
    software = replace(software, driver=driver)
    return Facts(target=target, software=software, environment=environment, gpus=gpus, gaps=gaps)


def examine(job: Job) -> Facts:
    from fp8doctor.examine.module_facts import examine_network
    from fp8doctor.examine.training_state import examine_training, with_recipe_of_the_step
    from fp8doctor.examine.walk import walk

    facts = examine_surroundings(job.target)
    gaps = dict(facts.gaps)
    marks = {"unused_marks": job.unused_marks, "in_a_function": job.in_a_function}
    tree = walk(job.model, job.training_step, **marks)
    network = with_recipe_of_the_step(examine_network(tree, gaps), tree, job)
    training = examine_training(tree, job, gaps)
    return replace(facts, network=network, training=training, workload=job.workload, gaps=gaps)
