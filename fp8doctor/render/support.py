"""What ``-v`` adds for whoever helps a user: versions, clocks, and how the step and its times were taken."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.facts import Facts, Gpu, Health, Workload, recorded
from fp8doctor.render.header import lacks_batch
from fp8doctor.wording import plural

SOFTWARE = {
    "python": "Python",
    "platform": "",
    "driver": "driver",
    "cublaslt": "cuBLASLt",
    "cudnn": "cuDNN",
    "triton": "Triton",
}
"""What is named of the software: its field -> what people call it."""

LOSSES = {"given": "the user's loss", "output.loss": "loss of the model's output", "mean": "mean as loss"}


def for_support(facts: Facts) -> tuple[str, ...]:
    """Tell what a maintainer asks for first, in a few words each."""
    return (*_versions(facts), *_clocks(facts), *_step(facts), *_process(facts))


def variables(facts: Facts) -> tuple[str, ...]:
    """List the environment variables that were looked at and are set, as a shell would show them."""
    if not recorded(facts, "environment.variables"):
        return ()
    return tuple(f"{name}={value}" for name, value in facts.environment.variables.items())


def not_timed(facts: Facts) -> tuple[str, ...]:
    """List shapes of layers that FP8, or its casts, could not be timed for, one sentence each."""
    shapes = facts.trial.shapes if recorded(facts, "trial.shapes") else ()
    return tuple(
        f"Not timed alone: {each.m} x {each.k} x {each.n} {each.recipe}: {each.reason}"
        for each in shapes
        if recorded(each, "reason") and each.reason
    )


def _versions(facts: Facts) -> Iterator[str]:
    software = facts.software if recorded(facts, "software") else None
    for name, label in SOFTWARE.items():
        if software is not None and recorded(software, name) and getattr(software, name) is not None:
            yield f"{label} {getattr(software, name)}".lstrip()


def _clocks(facts: Facts) -> Iterator[str]:
    yield from filter(None, map(_clock, facts.gpus if recorded(facts, "gpus") else ()))
    health = facts.trial.health if recorded(facts, "trial.health") else None
    if health is not None and _was_seen(health):
        low, high = health.sm_clock_low_mhz, health.sm_clock_high_mhz
        yield f"{low} to {high} MHz in {plural(health.samples, 'look')} while timed"


def _clock(gpu: Gpu) -> str:
    known = recorded(gpu, "sm_clock_mhz") and recorded(gpu, "sm_clock_max_mhz") and gpu.sm_clock_mhz
    return f"SM clock {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz" if known else ""


def _was_seen(health: Health) -> bool:
    names = ("samples", "sm_clock_low_mhz", "sm_clock_high_mhz")
    return all(recorded(health, name) and getattr(health, name) is not None for name in names)


def _step(facts: Facts) -> Iterator[str]:
    """Tell where the parts of the step came from, and what its trial left changed."""
    if recorded(facts, "workload"):
        yield from _sources(
            facts.workload, facts.training.autocast if recorded(facts, "training.autocast") else None
        )
    if recorded(facts, "trial.harm") and facts.trial.harm:
        yield f"not as before the trial: {', '.join(facts.trial.harm)}"


def _sources(workload: Workload, autocast: str | None) -> Iterator[str]:
    if recorded(workload, "note") and workload.note and not lacks_batch(workload):
        yield workload.note
    if recorded(workload, "loss_source"):
        yield LOSSES[workload.loss_source]
    if recorded(workload, "optimizer_source"):
        yield "made-up optimizer" if workload.optimizer_source == "made up" else "the user's optimizer"
    if recorded(workload, "autocast_source"):
        given = workload.autocast_source == "given"
        yield "the user's autocast" if given else f"autocast to {autocast}" if autocast else "no autocast"


def _process(facts: Facts) -> Iterator[str]:
    """List what else is in the process: other ranks, hooks, frames that torch.compile took or left."""
    distributed = facts.training.distributed if recorded(facts, "training.distributed") else None
    if distributed and recorded(distributed, "world_size"):
        yield plural(distributed.world_size, "rank")
    if recorded(facts, "network.modules"):
        yield plural(facts.network.modules, "module")
    if recorded(facts, "network.hooks") and facts.network.hooks:
        yield plural(facts.network.hooks, "hook")
    dynamo = facts.training.dynamo if recorded(facts, "training.dynamo") else None
    if dynamo and recorded(dynamo, "frames_ok") and recorded(dynamo, "frames_total") and dynamo.frames_total:
        yield f"Dynamo compiled {dynamo.frames_ok} of {plural(dynamo.frames_total, 'frame')}"
