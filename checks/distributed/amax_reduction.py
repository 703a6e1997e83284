"""Delayed scaling sends its amax to all ranks

What it finds. Transformer Engine's delayed scaling all-reduces its largest magnitudes (amax) over several
ranks in every forward and backward.

Why it matters. `DelayedScaling` has `reduce_amax=True` by default. At the end of every forward under the
autocast, and of every backward, all ranks of the amax group all-reduce the maxima of all layers. It is a few
kB, but every rank waits for the last one in the middle of the step. An autocast around each layer does it per
layer. Without a named group it covers all ranks of the job.

Fix. On Hopper or newer, scale by the current tensor (`Float8CurrentScaling()`): nothing is reduced. Or let
data-parallel ranks, which have the same weights, use their own amax (Transformer Engine 2.9).

    with te.autocast(recipe=DelayedScaling()):                   # before
        output = model(**batch)

    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    with te.autocast(recipe=DelayedScaling(reduce_amax=False)):  # after
        output = model(**batch)

When to ignore it. If ranks hold parts of one tensor (tensor or sequence parallelism): they need the
reduction, over their own `amax_reduction_group`. Up to 8 ranks, as on one host, it takes tens of microseconds
and is only information.

How it is detected, and limits. fp8doctor reads the recipe and the number of ranks in the amax group. It does
not time the reduction.

References. Transformer Engine 1.2 to 2.20 (`FP8GlobalStateManager`):
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
"""

from __future__ import annotations

from fp8doctor.facts import Distributed, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

OF_ONE_HOST = 8
"""Ranks on one host, whose links send a few kB in tens of microseconds. A choice: HGX boards have eight."""

STACK = "transformer_engine"


@check("DST003", "amax-reduction", area="distributed", severity="warning", changes_fp8=True)
def amax_reduction(facts: Facts) -> Finding | NotApplicable | None:
    if not any(layer.recipe == "delayed" for layer in facts.network.linears if layer.stack == STACK):
        return NotApplicable(reason="no Transformer Engine layer uses delayed scaling")
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
        explanation=f"{'All ranks of the job' if everybody else f'{ranks} ranks'} wait for each other once "
        "more at the end of each autocast and each backward, for a few kB.",
        evidence={"amax_ranks": ranks, "world_size": distributed.world_size},
        treatment=Treatment(
            name="own-amax",
            summary="scale by the current tensor, or by each rank's own amax if ranks hold whole tensors",
            code="recipe = DelayedScaling(reduce_amax=False)     # or Float8CurrentScaling()",
            kind="sketch",
        ),
    )


def _reduced(over: int | None) -> Facts:
    layer = float8(stack=STACK, recipe="delayed")
    return example(linears=(layer,), distributed=Distributed(world_size=16, amax_ranks=over))


FIRES = _reduced(over=16)
SILENT = _reduced(over=None)
