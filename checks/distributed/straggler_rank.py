"""The ranks wait for each other

Ranks meet in every step, and the fastest waits for the slowest. All have the same step time, which does not
show the slow one. FP8 makes the matmuls shorter and sends the same bytes, so communication that BF16 hid
becomes visible. Transformer Engine's `DelayedScaling` also all-reduces its largest magnitudes (amax), a few
kB: at the end of every forward under the autocast, and of every backward.

    loss.backward()                                     # before, DDP: every micro-batch sends its gradients

    with model.no_sync():                               # after: every micro-batch but the last
        loss.backward()
    recipe = DelayedScaling(reduce_amax=False)          # each rank's own amax (Transformer Engine 2.9)

Find what only the slow rank does: a slower disk, a longer shard of the data, logging, a slow GPU. Send less,
start earlier (prefetch), or compute more per byte (a larger batch). `Float8CurrentScaling()` reduces no amax.

Ignore it if the slow rank must do this work, or if you cannot change the batch or the network. Ranks that
hold parts of one tensor need the amax reduction, over their own `amax_reduction_group`; up to 8 ranks it is
only information. Ranks are compared under `fp8doctor run`, on one host. For communication the rank that waits
least counts: the others also wait for the last one to arrive.
https://docs.pytorch.org/docs/stable/notes/ddp.html
https://pytorch.org/blog/training-using-float8-fsdp2/
"""

from __future__ import annotations

from fp8doctor import kit
from fp8doctor.kit import Facts, Finding, NotApplicable, Saving, Treatment, check, example, percent, recorded

OF_ONE_HOST = 8
"""Ranks on one host, whose links send a few kB in tens of microseconds. A choice: HGX boards have eight."""

EVEN_RANKS = Treatment(
    name="even-ranks",
    summary="give every rank the same work, data and GPU",
    code="sampler = DistributedSampler(dataset)      # as much data for each rank\n"
    "# in the shell, for each GPU: nvidia-smi -q -d CLOCK,PERFORMANCE",
    kind="sketch",
)
OWN_AMAX = Treatment(
    name="own-amax",
    summary="scale by the current tensor, or by each rank's own amax if ranks hold whole tensors",
    code="recipe = DelayedScaling(reduce_amax=False)     # or Float8CurrentScaling()",
    kind="sketch",
)
HIDE = {
    "DDP": (
        "send the gradients once per step, with model.no_sync() for all micro-batches but the last",
        "with model.no_sync():     # every micro-batch but the last\n    loss.backward()",
    ),
    "FSDP2": (
        "prefetch the next block's weights",
        "block.set_modules_to_forward_prefetch([next_block])     # of each block",
    ),
}
"""Wrapper -> what hides communication, and saves no more than it hides."""

LARGER = (
    "use a larger batch per GPU: it computes more for the same bytes",
    "batch_size = 2 * batch_size     # more to compute for the same bytes",
)


@check("DST004", "straggler-rank", area="distributed", severity="warning")
def straggler_rank(facts: Facts) -> Finding | NotApplicable | None:
    if not recorded(facts, "ranks") and kit.if_recorded(one_process, facts):
        return NotApplicable(reason="one process")
    ranks, slower, gpus = kit.timed_ranks(facts), kit.behind(facts), kit.unlike_gpus(facts)
    if len(ranks) < 2:
        return NotApplicable(reason="fp8doctor timed fewer than two ranks")
    if slower:
        worst, *more = slower
        also = "".join(f" {each.in_words}." for each in more[:3])
        return Finding(
            title=f"{worst.in_words}, in steps of {worst.step_ms:,.1f} ms "
            f"({percent(100 * worst.by_ms / worst.step_ms)})",
            explanation=f"Medians over the watched steps of {len(ranks)} ranks. The others wait for it "
            f"whenever they exchange something.{also} {gpus}".rstrip(),
            evidence={
                "rank": worst.rank,
                "part": worst.what,
                "own_ms": worst.own_ms,
                "others_ms": worst.others_ms,
                "step_ms": worst.step_ms,
                "ranks": len(ranks),
            },
            saving_ms=Saving(low=0.0, high=worst.by_ms, basis="modelled"),
            treatment=EVEN_RANKS,
        )
    if not gpus:
        return None
    return Finding(
        title="The ranks run on different GPUs",
        explanation=f"{gpus} The fastest waits for the slowest whenever they exchange something.",
        evidence={"gpus": gpus},
        treatment=EVEN_RANKS,
    )


@check(
    "DST004",
    "exposed-communication",
    area="distributed",
    severity="warning",
    explained_by=("DST001", "straggler-rank"),
    was="DST005",
)
def exposed_communication(facts: Facts) -> Finding | NotApplicable | None:
    if facts.observed.clock != "cuda":
        return NotApplicable(reason="the steps did not run on a GPU")
    if one_process(facts):
        return NotApplicable(reason="one process")
    step, own = kit.step_ms(facts.observed), kit.exposed_ms(facts.observed)
    if step is None or own is None:
        return NotApplicable(reason="fp8doctor profiled no step")
    of_ranks = kit.exposed_of_ranks(facts)
    least, most, ranks = min([own, *of_ranks]), max([own, *of_ranks]), max(1, len(of_ranks))
    if not kit.counts(least, step):
        return None
    how = HIDE.get(facts.get("training.distributed.wrapper") or "")
    summary, code = how or LARGER
    return Finding(
        title=f"Exposed communication takes {least:.1f} of {step:,.1f} ms/step in your script "
        f"({percent(100 * least / step)})",
        explanation=f"Measured in one profiled step on {ranks} ranks. This is the rank that waits least; the "
        f"slowest waits {most:,.1f} ms. FP8 shortens the matmuls, not this.",
        evidence={"exposed_ms": least, "longest_ms": most, "step_ms": step, "ranks": ranks},
        saving_ms=Saving(low=0.0, high=least, basis="modelled") if how else None,
        treatment=Treatment(name="hide-communication", summary=summary, code=code, kind="sketch"),
    )


@check("DST004", "amax-reduction", area="distributed", severity="warning", changes_fp8=True, was="DST003")
def amax_reduction(facts: Facts) -> Finding | NotApplicable | None:
    te = [linear for linear in facts.network.linears if linear.stack == "transformer_engine"]
    if not any(linear.recipe == "delayed" for linear in te):
        return NotApplicable(reason="no Transformer Engine layer uses delayed scaling")
    distributed = facts.training.distributed
    if distributed is None or distributed.world_size < 2:
        return NotApplicable(reason="one process")
    ranks, world = distributed.amax_ranks or 1, distributed.world_size
    if ranks < 2:
        return None
    return Finding(
        severity=None if ranks > OF_ONE_HOST else "info",
        title=f"Delayed scaling reduces its amax over {ranks} ranks in every forward and backward",
        explanation=f"{'All ranks of the job' if ranks == world else f'{ranks} ranks'} wait for each other "
        "once more at the end of each autocast and each backward, for a few kB.",
        evidence={"amax_ranks": ranks, "world_size": world},
        treatment=OWN_AMAX,
    )


def one_process(facts: Facts) -> bool:
    distributed = facts.training.distributed
    return distributed is None or distributed.world_size < 2


def _job(late_ms: float = 0.3, communication_ms: float = 4.0, amax_ranks: int | None = None) -> Facts:
    """Two watched ranks with steps of 100 ms; the second calls its model so much later."""
    parts = kit.Breakdown(families_ms={"gemm_fp8": 50.0, "communication": communication_ms}, reliable=True)
    first, second = (
        kit.Observation(
            steps_ms=(100.0,) * 3, clock="cuda", breakdown=parts, data_ms=None, before_forward_ms=(ms,) * 3
        )
        for ms in (0.3, late_ms)
    )
    processes = (kit.Rank(rank=0, observed=first, gpu=None), kit.Rank(rank=1, observed=second, gpu=None))
    distributed = kit.Distributed(world_size=16, wrapper="DDP", amax_ranks=amax_ranks)
    layers = (kit.float8(stack="transformer_engine", recipe="delayed"),)
    ranks = kit.Ranks(world_size=2, processes=processes)
    return example(observed=first, distributed=distributed, ranks=ranks, linears=layers)


FIRES = (_job(late_ms=20.0), _job(communication_ms=25.0), _job(amax_ranks=16))
SILENT = _job()
