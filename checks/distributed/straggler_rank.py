"""The ranks wait for each other

Ranks meet in every step, and the fastest waits for the slowest. FP8 makes the matmuls shorter and sends the
same bytes, so communication that BF16 hid becomes visible. Transformer Engine's `DelayedScaling` also
all-reduces its largest magnitudes (amax): at the end of every forward under the autocast, and every backward.

    loss.backward()                                     # before, DDP: every micro-batch sends its gradients

    with model.no_sync():                               # after: every micro-batch but the last
        loss.backward()
    recipe = DelayedScaling(reduce_amax=False)          # each rank's own amax (Transformer Engine 2.9)

Find what only the slow rank does: a slower disk, a longer shard of the data, logging, a slow GPU. Send less,
start earlier (prefetch), or compute more per byte. Ranks that hold parts of one tensor need the amax
reduction. Ignore it if the slow rank must do this work. `fp8doctor run` compares the ranks of one host.
https://pytorch.org/blog/training-using-float8-fsdp2/
"""

from fp8doctor import kit

OF_ONE_HOST = 8  # ranks with fast links: HGX boards have eight GPUs
EVEN_RANKS = kit.Treatment(
    name="even-ranks",
    summary="give every rank the same work, data and GPU",
    code="sampler = DistributedSampler(dataset)      # as much data for each rank\n"
    "# in the shell, for each GPU: nvidia-smi -q -d CLOCK,PERFORMANCE",
    kind="sketch",
)
OWN_AMAX = kit.Treatment(
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

LARGER = ("use a larger batch per GPU: it computes more for the same bytes", "batch_size = 2 * batch_size")


@kit.check("DST004", "straggler-rank", severity="warning")
def straggler_rank(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    if not kit.recorded(facts, "ranks") and kit.if_recorded(one_process, facts):
        return kit.NotApplicable(reason="one process")
    if len(kit.watched.timed_ranks(facts)) < 2:
        return kit.NotApplicable(reason="fp8doctor timed fewer than two ranks")
    if not (slower := kit.watched.behind(facts)):
        return None
    worst, *more = slower
    also = "".join(f" {each.in_words}." for each in more[:3])
    return kit.Finding(
        title=f"{worst.in_words}, in steps of {worst.step_ms:,.1f} ms "
        f"({kit.percent(100 * worst.by_ms / worst.step_ms)})",
        explanation="Medians over the watched steps. The others wait for it whenever they exchange something."
        f"{also}",
        evidence={
            "rank": worst.rank,
            "part": worst.what,
            "own_ms": worst.own_ms,
            "others_ms": worst.others_ms,
        },
        saving_ms=kit.Saving(low=0.0, high=worst.by_ms, basis="modelled"),
        treatment=EVEN_RANKS,
    )


@kit.check(
    "DST004",
    "exposed-communication",
    severity="warning",
    explained_by=("DST001", "straggler-rank"),
    was="DST005",
)
def exposed_communication(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    if facts.observed.clock != "cuda":
        return kit.NotApplicable(reason="the steps did not run on a GPU")
    if one_process(facts):
        return kit.NotApplicable(reason="one process")
    step, own = kit.watched.step_ms(facts.observed), kit.watched.exposed_ms(facts.observed)
    if step is None or own is None:
        return kit.NotApplicable(reason="fp8doctor profiled no step")
    of_ranks = [own, *kit.watched.exposed_of_ranks(facts)]
    least, most = min(of_ranks), max(of_ranks)
    if not kit.watched.counts(least, step):
        return None
    how = HIDE.get(facts.get("training.distributed.wrapper") or "")
    summary, code = how or LARGER
    to = f" to {most:,.1f}" if f"{most:,.1f}" != f"{least:,.1f}" else ""
    return kit.Finding(
        title=f"Exposed communication takes {least:,.1f}{to} ms/step",
        explanation="Measured in one profiled step. This is the rank that waits least; the slowest waits "
        f"{most:,.1f} ms. FP8 shortens the matmuls, not this.",
        evidence={"exposed_ms": least, "longest_ms": most, "step_ms": step},
        saving_ms=kit.Saving(low=0.0, high=least, basis="modelled") if how else None,
        treatment=kit.Treatment(name="hide-communication", summary=summary, code=code, kind="sketch"),
    )


@kit.check("DST004", "amax-reduction", severity="warning", changes_fp8=True, was="DST003")
def amax_reduction(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    te = [linear for linear in facts.network.linears if linear.stack == "transformer_engine"]
    if not any(linear.recipe == "delayed" for linear in te):
        return kit.NotApplicable(reason="no Transformer Engine layer uses delayed scaling")
    distributed = facts.training.distributed
    if distributed is None or distributed.world_size < 2:
        return kit.NotApplicable(reason="one process")
    if (ranks := distributed.amax_ranks or 1) < 2:
        return None
    return kit.Finding(
        severity=None if ranks > OF_ONE_HOST else "info",
        title=f"Delayed scaling reduces its amax over {ranks} ranks in every forward and backward",
        explanation="They wait for each other at the end of each autocast and each backward, for a few kB.",
        evidence={"amax_ranks": ranks, "world_size": distributed.world_size},
        treatment=OWN_AMAX,
    )


def one_process(facts: kit.Facts) -> bool:
    return facts.training.distributed is None or facts.training.distributed.world_size < 2


def _job(late_ms: float = 0.3, communication_ms: float = 4.0, amax_ranks: int | None = None) -> kit.Facts:
    """Two watched ranks with steps of 100 ms; the second calls its model so much later."""
    parts = kit.facts.Breakdown(
        families_ms={"gemm_fp8": 50.0, "communication": communication_ms}, reliable=True
    )
    seen = {"steps_ms": (100.0,) * 3, "clock": "cuda", "breakdown": parts, "data_ms": None}
    ranks = [kit.facts.Observation(**seen, before_forward_ms=(ms,) * 3) for ms in (0.3, late_ms)]  # type: ignore[arg-type]
    processes = tuple(kit.facts.Rank(rank=i, observed=each) for i, each in enumerate(ranks))
    distributed = kit.facts.Distributed(world_size=16, wrapper="DDP", amax_ranks=amax_ranks)
    layers = (kit.float8(stack="transformer_engine", recipe="delayed"),)
    of_ranks = kit.facts.Ranks(world_size=2, processes=processes)
    return kit.example(observed=ranks[0], distributed=distributed, ranks=of_ranks, linears=layers)


FIRES = (_job(late_ms=20.0), _job(communication_ms=25.0), _job(amax_ranks=16))
SILENT = _job()
