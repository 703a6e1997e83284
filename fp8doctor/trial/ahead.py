"""Compiling ahead, in a helper beside the trial: every arm is built at the smallest cut, so that the graphs
of its blocks are in the compiler's caches on disk, where the trial finds them.

Blocks that are compiled one by one have the same graphs at every depth, also in code objects of a cut's own
(`fxgraph_cache_hit`). One graph of several blocks is another at every depth, and is not compiled ahead.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

import torch

from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts
from fp8doctor.loading.job import Job
from fp8doctor.trial.arms import arms
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench

MOST_HELPERS, CORES_EACH = 2, 6
"""Helpers at most, and the cores that each of them and the trial need: a compilation keeps several busy."""

LAYERS = 2
"""Layers that a helper has the model file build, where its function takes their number: the fewest that are a
list of repeated blocks."""

MEMORY_SHARE, FREE_SHARE = 0.2, 0.6
"""Shares of the GPU's memory: that one helper may take, and that has to be free when helpers are started."""

LARGEST_GIB, LONGEST_LOAD_S = 4.0, 20.0
"""Weights of a model, and the seconds that its file took to load, up to which helpers load it too where
nothing cuts it while it is built. A choice: each helper has the weights in the host's memory once more, and a
file that trains when it is imported would train again."""


def how_many(job: Job, device: torch.device, loaded_s: float = 0.0) -> int:
    """Return the number of helpers that there is room for; none beside a trial on a CPU, which needs the
    cores."""
    weights = sum(each.numel() * each.element_size() for each in job.model.parameters())
    dear = weights > LARGEST_GIB * 2**30 or loaded_s > LONGEST_LOAD_S
    if device.type != "cuda" or (job.rebuild is None and dear):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    cores = len(os.sched_getaffinity(0))
    return max(0, min(MOST_HELPERS, cores // CORES_EACH - 1)) if free > FREE_SHARE * total else 0


def confine(device: torch.device) -> None:
    """Keep this process, a helper, to its share of the GPU and behind the trial on the CPU."""
    os.nice(5)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device)


def compile_arms(
    job: Job, facts: Facts, prescription: Sequence[Step], names: Collection[str], device: torch.device
) -> Iterator[str]:
    """Build the arms of these names, and name each that was built."""
    planned = {plan.name: plan for plan in arms(facts, prescription, job)}
    bench = Bench(job, [blocks.name for blocks in facts.network.blocks], device, smallest=True)
    for name in names:
        if name in planned:
            attempt = Attempt(planned[name])
            bench.build(attempt)
            bench.let_go()
            if attempt.no_number is None:
                yield name
