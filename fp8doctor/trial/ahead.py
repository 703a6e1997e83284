"""Compiling ahead, in a helper beside the trial: arms are built there, so that their graphs are in the
compiler's caches on disk, where the trial finds them.

Blocks that are compiled one by one have the same graphs at every depth, also in code objects of a cut's own
(`fxgraph_cache_hit`), so that the smallest cut will do. One graph of several blocks is another at every
depth, and is built at the very cuts of the trial.

Helpers load the target when the trial's process has loaded and looked at it. Blocks are built from when the
rows are counted, as far as no shape tells how (`fp8doctor.trial.early`), and beside the compilation of the
casts; while GEMMs and casts are timed, helpers are stopped (`fp8doctor.worker.ahead`). A build takes steps on
the GPU, which would be in the times of GEMMs of a tenth of a millisecond: processes take turns on a GPU, and
no reading of the host (STP009) tells of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.trial.arms import arms
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.depth import Cut
from fp8doctor.trial.copies.replica import unwrapped
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.cuts import compiled_as_one
from fp8doctor.trial.measure.device import DeviceLost
from fp8doctor.trial.measure.host import free_memory
from fp8doctor.trial.variant import ArmPlan

_log = logging.getLogger("fp8doctor")

MEMORY_SHARE, FREE_SHARE = 0.2, 0.6
"""Shares of the GPU's memory: that one helper may take, and that has to be free when helpers are started."""

SMALL_GIB, LONGEST_LOAD_S = 4.0, 30.0
"""Weights of a model that each helper may load without a look at the memory, and the seconds that its file
took to load, up to which helpers load it too where nothing cuts it while it is built. A choice: a file that
trains when it is imported would train again. A Gemma 2B took 20.6 s with a disk that had read nothing yet."""

LOADING, HOST_SHARE = 3.0, 0.5
"""Memory of the host that loading takes / the weights, which may be drawn in FP32 before they are converted
and later come from a GPU, and the share of what is free that all helpers may take for it. A choice: a host
without memory ends the trial."""


def how_many(job: Job, device: torch.device, started: int, loaded_s: float = 0.0, *, shallow: bool) -> int:
    """Return the number of the helpers that were ``started`` that there is room for; none beside a trial on a
    CPU, which needs the cores. ``shallow`` says that they build a few layers only."""
    if not started or device.type != "cuda" or (loaded_s > LONGEST_LOAD_S and not shallow):
        return 0
    free, total = torch.cuda.mem_get_info(device)
    if free <= FREE_SHARE * total:
        return 0
    small = shallow or _weights(job.model) <= SMALL_GIB * 2**30
    return started if small else min(started, _that_load_it(job.model, total))


def _that_load_it(model: nn.Module, gpu: int) -> int:
    """Return the number of helpers that have memory for the whole of a large model: the host's, and while
    they load it on a GPU, where the file puts it there, no more together than one of them may take."""
    weights = _weights(model)
    by_host = HOST_SHARE * (free_memory() or 0) / (LOADING * weights)
    return int(min(by_host, MEMORY_SHARE * gpu / weights if _on_a_gpu(model) else by_host))


def _weights(model: nn.Module) -> int:
    """Sum up the parameters of a model, in bytes."""
    return sum(each.numel() * each.element_size() for each in model.parameters())


def _on_a_gpu(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def confine(device: torch.device) -> None:
    """Keep this process, a helper, to its share of the GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device)


def off_the_gpu(job: Job, device: torch.device) -> None:
    """Move a large model of a helper to the host, as far as it can be moved: beside a cut there is no memory
    for it (`MEMORY_SHARE`)."""
    if device.type == "cuda" and _weights(job.model) > SMALL_GIB * 2**30:
        with suppress(Exception):  # whatever a module of others raises: a helper may do without
            job.model.to("cpu")
        torch.cuda.empty_cache()


def compile_arms(
    job: Job,
    work: Iterable[tuple[str, Mapping[str, int] | None, dict[str, Any]]],
    proposed: Callable[[Facts], Sequence[Step]],
    device: torch.device,
) -> Iterator[float | bool | str | None]:
    """Build each arm at its cut, as it is planned with its facts, and tell the seconds that its warm-up took;
    None where it was not built, False where there was no memory for it. One that takes the GPU's context
    down is the last, told in a sentence.

    A cut is told by the blocks that each list keeps; None is the smallest of all. ``proposed`` says what the
    checks propose by the facts.
    """
    known: dict[str, Any] | None = None
    planned: dict[str, ArmPlan] = {}
    lists: list[str] = []
    benches: dict[tuple[tuple[str, int], ...], Bench] = {}
    for name, kept, told in work:
        try:
            if told != known:
                facts = Facts.from_dict(told)
                planned = {
                    each.name: each
                    for plan in arms(facts, proposed(facts), job)
                    for each in (plan, *plan.if_host_bound)
                }
                lists, known = [blocks.name for blocks in facts.network.blocks], told
            cut = smallest(job, lists) if kept is None else Cut(kept)
            blocks = tuple(cut.kept.items())
            if blocks not in benches:
                benches[blocks] = Bench(job, lists, device, only=cut)
            yield _built(benches[blocks], planned[name])
        except DeviceLost as lost:
            yield str(lost)
            return
        except Exception:
            _log.debug("%s is not compiled ahead", name, exc_info=True)
            yield None


def _built(bench: Bench, plan: ArmPlan) -> float | bool | None:
    attempt = Attempt(plan)
    bench.build(attempt)
    bench.let_go()
    if attempt.why is Reason.OUT_OF_MEMORY:
        return False
    return attempt.ready[0].warm_up_s if attempt.no_number is None else None


def smallest(job: Job, lists: Sequence[str]) -> Cut:
    """Plan the smallest cut of the job that has every graph: what enters the first block may need no
    gradient, as under adapters, and is another graph then."""
    root = unwrapped(job.model)
    return depth.shallowest(root, depth.named_in(root, lists))


def layers_to_load(job: Job, facts: Facts) -> int | None:
    """Return the layers that a helper has the model file's function build; None where it needs them all, or
    none can be built apart.

    One graph of several blocks is compiled at the cuts of the trial, blocks are at the smallest.
    """
    if job.rebuild is None:
        return None
    root = unwrapped(job.model)
    within = depth.named_in(root, [blocks.name for blocks in facts.network.blocks])
    if not compiled_as_one(job, within):
        return max(depth.shallowest(root, within).kept.values(), default=None)
    plan = depth.plans(root, within, as_one=True)[0]
    return None if plan.whole else max(max(cut.kept.values()) for cut in plan.cuts)
