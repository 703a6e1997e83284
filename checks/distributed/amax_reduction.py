"""Delayed scaling sends its amax to all ranks

Looks at: Transformer Engine layers with delayed scaling in a job of several processes: whether the
recipe reduces the largest magnitudes over ranks, and over how many.

Why it costs time. `DelayedScaling` has `reduce_amax=True`. At the end of every forward under the
autocast, and of every backward, all ranks of the amax group all-reduce the maxima of all layers: a
few kB, but every rank waits for the last one, in the middle of the step. An autocast around each
layer does it for each layer. Without a group that is named it is done over all ranks of the job.

What to do. Scale by the current tensor where the GPU is a Hopper or newer: nothing is reduced. Or
let data-parallel ranks, whose weights are the same, scale by their own.

    with te.autocast(recipe=DelayedScaling()):                      # before
    with te.autocast(recipe=DelayedScaling(reduce_amax=False)):     # after
    with te.autocast(recipe=Float8CurrentScaling()):                # or

Ranks that hold parts of one tensor (tensor or sequence parallelism) need the reduction, over their
own group: `amax_reduction_group`. On one host it takes tens of microseconds: then this is
information.

Evidence: read in Transformer Engine 1.2 to 2.20 (`FP8GlobalStateManager`).
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
"""

from __future__ import annotations

from fp8doctor.facts import Distributed, Facts, Linear, Network, Training
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

OF_ONE_HOST = 8
"""Ranks, as many as the GPUs of one host, whose links take the few kB in tens of microseconds. A choice:
HGX and DGX boards have eight."""

STACK = "transformer_engine"


@check("DST003", "amax-reduction", area="distributed", severity="warning", changes_fp8=True)
def amax_reduction(facts: Facts) -> Finding | NotApplicable | None:
    if not any(layer.recipe == "delayed" for layer in facts.network.linears if layer.stack == STACK):
        return NotApplicable(reason="no layer of Transformer Engine with delayed scaling")
    distributed = facts.training.distributed
    if distributed is None or distributed.world_size < 2:
        return NotApplicable(reason="one process")
    ranks = distributed.amax_ranks
    if ranks is None or ranks < 2:
        return None
    everybody = ranks == distributed.world_size
    return Finding(
        severity=None if ranks > OF_ONE_HOST else "info",
        title=f"Delayed scaling reduces its amax over {ranks} ranks in every forward and backward",
        explanation=f"{'All' if everybody else str(ranks)} {'ranks of the job' if everybody else 'of them'} "
        "wait for each other once more at the end of each autocast and of each backward, for a few kB.",
        evidence={"amax_ranks": ranks, "world_size": distributed.world_size},
        treatment=Treatment(
            name="own-amax",
            summary="scale by the current tensor, or by each rank's own amax where ranks hold whole tensors",
            code="recipe = DelayedScaling(reduce_amax=False)     # or Float8CurrentScaling()",
            kind="sketch",
        ),
    )


def _reduced(over: int | None) -> Facts:
    return Facts(
        network=Network(linears=(Linear(name="up", stack=STACK, recipe="delayed"),)),
        training=Training(distributed=Distributed(world_size=16, amax_ranks=over)),
    )


SICK = _reduced(over=16)
HEALTHY = _reduced(over=None)
