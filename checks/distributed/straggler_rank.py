"""One rank is slower than the others

What it finds. One rank takes longer than the others before they can go on, or runs on another GPU.

Why it matters. Ranks meet in every step to exchange gradients or shards, and the fastest waits for the
slowest. All ranks then have the same step time, so the step time alone does not show which one is slow. FP8
shortens the matmuls of all ranks, but not the wait.

Fix. Find what only this rank does: a slower disk, a longer shard of the data, logging, evaluation, or a slow
GPU.

    if dist.get_rank() == 0:                      # before
        log_images(model, batch)

    if dist.get_rank() == 0 and step % 500 == 0:  # after
        log_images(model, batch)

When to ignore it. If the slow rank must do this work and the loss is small.

How it is detected, and limits. Under `fp8doctor run`, each rank on this host reports its step and its wait
for data. It also reports the time before the model is called, and its GPU's work in a profiled step.
fp8doctor compares the medians. It cannot separate host work between forward and optimizer step from waiting.

References. https://docs.pytorch.org/docs/stable/notes/ddp.html
https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from fp8doctor.analysis.rank_comparison import Behind, behind, timed_ranks, unlike_gpus
from fp8doctor.facts import Facts, Observation, Rank, Ranks, recorded
from fp8doctor.finding import Finding, NotApplicable, Saving, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent

TREATMENT = Treatment(
    name="even-ranks",
    summary="give every rank the same work, data and GPU",
    code="sampler = DistributedSampler(dataset)      # as much data for each rank\n"
    "# in the shell, for each GPU: nvidia-smi -q -d CLOCK,PERFORMANCE",
    kind="sketch",
)


@check("DST004", "straggler-rank", area="distributed", severity="warning")
def straggler_rank(facts: Facts) -> Finding | NotApplicable | None:
    if not recorded(facts, "ranks") and alone(facts):
        return NotApplicable(reason="one process")
    timed = timed_ranks(facts)
    if len(timed) < 2:
        return NotApplicable(reason="fp8doctor timed fewer than two ranks")
    slower = behind(facts)
    gpus = unlike_gpus(facts)
    if slower:
        return _slow(slower, len(timed), gpus)
    return _other_gpu(gpus) if gpus else None


def alone(facts: Facts) -> bool:
    """Whether this process is known to be the only one of its job."""
    if not recorded(facts, "training.distributed"):
        return False
    distributed = facts.training.distributed
    return distributed is None or distributed.world_size < 2


def _slow(slower: tuple[Behind, ...], timed: int, gpus: dict[int, str]) -> Finding:
    worst = slower[0]
    also = "".join(
        f" Rank {each.rank} takes {each.own_ms:,.1f} ms {each.what}, the others {each.others_ms:,.1f} ms."
        for each in slower[1:4]
    )
    return Finding(
        title=f"Rank {worst.rank} takes {worst.own_ms:,.1f} ms {worst.what}, the others "
        f"{worst.others_ms:,.1f} ms, in steps of {worst.step_ms:,.1f} ms "
        f"({percent(100 * worst.by_ms / worst.step_ms)})",
        explanation=f"Medians over the watched steps of {timed} ranks. The others wait for it whenever they "
        f"exchange something.{also}" + (f" {_in_words(gpus)}" if gpus else ""),
        evidence={
            "rank": worst.rank,
            "part": worst.what,
            "own_ms": worst.own_ms,
            "others_ms": worst.others_ms,
            "step_ms": worst.step_ms,
            "ranks": timed,
        },
        saving_ms=Saving(low=0.0, high=worst.by_ms, basis="modelled"),
        treatment=TREATMENT,
    )


def _other_gpu(gpus: dict[int, str]) -> Finding:
    return Finding(
        title="The ranks run on different GPUs",
        explanation=f"{_in_words(gpus)} The fastest waits for the slowest whenever they exchange something.",
        evidence={f"rank_{rank}": text for rank, text in gpus.items()},
        treatment=TREATMENT,
    )


def _in_words(gpus: dict[int, str]) -> str:
    return "GPUs: " + "; ".join(f"rank {rank} {text}" for rank, text in sorted(gpus.items())) + "."


def _ranks(*before_forward_ms: float) -> Facts:
    steps = [
        Observation(steps_ms=(50.0,) * 3, data_ms=None, before_forward_ms=(ms,) * 3)
        for ms in before_forward_ms
    ]
    processes = [Rank(rank=rank, end="ended", observed=step, gpu=None) for rank, step in enumerate(steps)]
    return Facts(ranks=Ranks(world_size=len(processes), processes=tuple(processes)))


FIRES = _ranks(0.3, 20.0)
SILENT = _ranks(0.3, 0.5)
