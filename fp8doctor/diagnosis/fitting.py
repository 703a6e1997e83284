"""Changes that make a job fit into its GPU's memory, by the estimated peak.

Each takes a peak to the peak after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fp8doctor.analysis.activations import GIB
from fp8doctor.analysis.compile_coverage import cache_off
from fp8doctor.analysis.layers import in_python
from fp8doctor.analysis.memory import BYTES, USABLE, Fit, Peak, fit, recomputing
from fp8doctor.facts import Facts, Network, if_recorded
from fp8doctor.finding import Treatment
from fp8doctor.recipes import stack_of

LEAST_SHARE = 0.05
"""Share of the GPU's memory that a change has to free to be worth its lines. A choice."""

MOST_GPUS = 1024
"""GPUs up to which a count is looked for. A choice."""


BASE_IN = "base-in-"
"""Begins the names of treatments that store the base in fewer bits."""

MAKES_FIT = frozenset(
    {
        "smaller-batch",
        "checkpointing-on",
        "optimizer-in-8-bits",
        f"{BASE_IN}8-bits",
        f"{BASE_IN}4-bits",
        "shard",
    }
)
"""Names of the treatments below."""


class Job(NamedTuple):
    facts: Facts
    found: Fit
    room: float
    """GiB that a step may fill."""


def to_fit(facts: Facts) -> tuple[list[Treatment], Peak, bool] | None:
    """Choose the fewest changes with which the estimated peak fits; None if it fits now, or is unknown.

    Several GPUs come last, for what nothing makes fit one. Returns the changes, the peak after them, and
    whether that fits.
    """
    found = if_recorded(fit, facts)
    if found is None or not found.may_be_too_large:
        return None
    job = Job(facts, found, USABLE * found.gpu_gib)
    for count in range(1, len(CHANGES) + 1):
        for changes in itertools.combinations(CHANGES, count):
            chosen, peak = _with(changes, job)
            if peak.gib <= job.room and len(chosen) == count:
                return chosen, peak, True
    chosen, peak = _with((*CHANGES, shards), job)
    return chosen, peak, peak.gib <= job.room


def _with(changes: Iterable[Change], job: Job) -> tuple[list[Treatment], Peak]:
    chosen, peak = list[Treatment](), job.found.now
    for change in changes:
        for treatment, after in if_recorded(list, change(job, peak)) or ():
            if after.gib < peak.gib - LEAST_SHARE * job.found.gpu_gib:
                chosen.append(treatment)
                peak = after
    return chosen, peak


Ways = Iterator[tuple[Treatment, Peak]]
"""The change, and the peak after it; none if it does not apply."""

Change = Callable[[Job, Peak], Ways]


def smaller_batch(job: Job, peak: Peak) -> Ways:
    batch = job.found.batch
    most = peak.samples(job.found.gpu_gib, batch) if batch else None
    if most and batch and most < batch:
        count = math.ceil(batch / most)
        code = f"batch_size = {most}   # from {batch}\ngradient_accumulation_steps = {count}   # times yours"
        summary = f"use micro-batches of {most} samples and accumulate their gradients"
        activations = (peak.activations or 0.0) * most / batch
        yield _change("smaller-batch", summary, code), peak._replace(activations=activations)


def checkpointing_on(job: Job, peak: Peak) -> Ways:
    """Checkpoint every block: it keeps its input, and one block at a time its activations."""
    facts, network = job.facts, job.facts.network
    forms = facts.training.checkpointing
    if not network.blocks or any(each.active for each in forms):
        return
    names = {f"{blocks.name}.{i}" for blocks in network.blocks for i in range(blocks.count)}

    def block_of(name: str) -> str | None:
        parts = name.split(".")
        return next((at for i in range(len(parts)) if (at := ".".join(parts[:i])) in names), None)

    inside = {each.name: block for each in network.linears if (block := block_of(each.name))}
    after = recomputing(job.found, facts, inside)
    if any(each.form == "huggingface" for each in forms):
        code = f"{in_python('gradient_checkpointing_enable', network)}()\n{cache_off(facts)}"
    else:
        te = any(stack_of(each).under_autocast for each in network.fp8)
        code = "\n".join(
            f"for i, block in enumerate({at}):\n"
            f"    {at}[i] = checkpoint_wrapper(block{', checkpoint_fn=te.checkpoint' if te else ''})"
            for at in (in_python(each.name, network) for each in network.blocks)
        )
    if after is not None:
        held = peak.held._replace(fp8_copies=after.held.fp8_copies)
        peak = Peak(held, after.activations, after.dequantized)
        yield _change("checkpointing-on", "checkpoint the blocks", code), peak


def smaller_optimizer(job: Job, peak: Peak) -> Ways:
    """Keep both moments of Adam in 8 bits."""
    known = (job.facts.get("training.optimizer") or "AdamW").rpartition(".")[2]
    element = max((BYTES.get(each, 1) for each in job.facts.network.dtypes), default=2)
    if known in ("Adam", "AdamW"):
        code = f"optimizer = {known}8bit(parameters, lr=...)"
        after = peak._replace(held=peak.held._replace(optimizer=peak.held.optimizer / element))
        yield _change("optimizer-in-8-bits", "keep the optimizer's state in 8 bits", code), after


def base_in_fewer_bits(job: Job, peak: Peak) -> Ways:
    """Store the frozen Linears of a job that trains few parameters in 8 bits, or in 4 if they are in 8."""
    facts, network = job.facts, job.facts.network
    if trains_most(network):
        return
    frozen = [each for each in network.linears if each.requires_grad is False]
    wide = [each for each in frozen if BYTES.get(each.dtype, 1) > 1]
    in_8_bits = [each for each in frozen if each.dtype.startswith("float8") or each.dtype == "int8"]
    bits = 4 if sum(each.parameters for each in in_8_bits) > sum(each.parameters for each in wide) else 8
    changed = in_8_bits if bits == 4 else wide
    freed = sum((BYTES.get(each.dtype, 1) - bits / 8) * each.parameters for each in changed) / GIB
    freed /= facts.get("training.distributed.shards") or 1
    if bits == 4:
        summary = "store the frozen base in 4 bits, or swap some of its blocks to the CPU"
        code = (
            "# where the base is loaded, before LoRA\n"
            "config = BitsAndBytesConfig(load_in_4bit=True)\n"
            "# or keep it as it is: blocks_to_swap of kohya's trainers and diffusion-pipe,\n"
            "# enable_group_offload() of diffusers; the step waits for the copies"
        )
    else:
        summary = "store the frozen base in 8 or 4 bits, and leave FP8 training off"
        code = (
            "# where the base is loaded, before LoRA; in 4 bits: load_in_4bit=True\n"
            "config = BitsAndBytesConfig(load_in_8bit=True)\n"
            "# and no conversion to FP8: it needs weights in 16 or 32 bits"
        )
    after = peak._replace(held=peak.held._replace(weights=peak.held.weights - freed))
    yield _change(f"{BASE_IN}{bits}-bits", summary, code), after


def trains_most(network: Network) -> bool:
    return network.trainable_parameters >= network.parameters / 2


def shards(job: Job, peak: Peak) -> Ways:
    """Shard weights, gradients and optimizer state over as few GPUs as it takes."""
    network = job.facts.network
    count = next((n for n in range(2, MOST_GPUS + 1) if _over(n, peak).gib <= job.room), None)
    if count is None:
        return
    lines = [
        f"for block in {in_python(each.name, network)}:\n    fully_shard(block)" for each in network.blocks
    ]
    code = "\n".join(("# after FP8 and torch.compile, before the optimizer", *lines, "fully_shard(model)"))
    summary = f"shard the model over {count} GPUs (FSDP2)"
    summary += ", or train adapters (LoRA)" * trains_most(network)
    yield _change("shard", summary, code), _over(count, peak)


def _over(count: int, peak: Peak) -> Peak:
    held = peak.held
    parts = (held.weights / count, held.gradients / count, held.optimizer / count)
    return peak._replace(held=held._replace(weights=parts[0], gradients=parts[1], optimizer=parts[2]))


CHANGES: tuple[Change, ...] = (smaller_batch, checkpointing_on, smaller_optimizer, base_in_fewer_bits)
"""What frees memory on one GPU, the one that changes least of the training first."""


def _change(name: str, summary: str, code: str) -> Treatment:
    return Treatment(name=name, summary=summary, code=code)
