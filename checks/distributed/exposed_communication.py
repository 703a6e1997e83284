"""The GPU waits for communication

What it finds. In the profiled step, the GPU spends much time on collectives while it computes nothing.

Why it matters. All-gathers and reductions usually run behind matmuls. FP8 makes the matmuls shorter, but
sends the same bytes. Communication that BF16 hid becomes visible, so FP8 gains less than its matmuls do.

Fix. Send less (with DDP `model.no_sync()` for all micro-batches but the last), start earlier (prefetch,
smaller units), or compute more per byte (a larger batch). DST001 covers the FP8 all-gather of torchao.

    loss.backward()               # before, DDP: every micro-batch sends its gradients

    with model.no_sync():         # after: every micro-batch but the last
        loss.backward()

When to ignore it. If you cannot change the batch or the network and already send FP8.

How it is detected, and limits. Under `fp8doctor run`, each rank profiles one step. fp8doctor takes the rank
that waits least: the others also wait for the last one to arrive. It is one step, and one host's ranks.

References. https://pytorch.org/blog/training-using-float8-fsdp2/
https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from fp8doctor.analysis.rank_comparison import exposed_ms, exposed_of_ranks, step_ms
from fp8doctor.analysis.waiting import counts
from fp8doctor.facts import Breakdown, Distributed, Facts, Observation, Rank, Ranks
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Saving, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent

LINES = {
    "DDP": "with model.no_sync():     # every micro-batch but the last\n    loss.backward()",
    "FSDP2": "block.set_modules_to_forward_prefetch([next_block])     # of each block",
}
"""Wrapper -> lines that send less or start earlier."""

ACTIONS = {
    "DDP": "send the gradients once per step, with model.no_sync() for all micro-batches but the last",
    "FSDP2": "prefetch the next block's weights",
}
"""Wrapper -> what its lines do. They save no more than the communication that they hide."""

LARGER = "use a larger batch per GPU: it computes more for the same bytes"

LARGER_BATCH = "batch_size = 2 * batch_size     # more to compute for the same bytes"


@check(
    "DST005",
    "exposed-communication",
    area="distributed",
    severity="warning",
    explained_by=("DST001", "DST002", "DST004"),
)
def exposed_communication(facts: Facts) -> Finding | NotApplicable | None:
    if facts.observed.clock != "cuda":
        return NotApplicable(reason="the steps did not run on a GPU")
    distributed = facts.training.distributed
    if distributed is None or distributed.world_size < 2:
        return NotApplicable(reason="one process")
    step = step_ms(facts.observed)
    own = exposed_ms(facts.observed)
    if step is None or own is None:
        return NotApplicable(reason="fp8doctor profiled no step")
    of_ranks = exposed_of_ranks(facts)
    least = min([own, *of_ranks])
    share = 100 * least / step
    if not counts(least, step):
        return None
    kind = distributed.get("wrapper")
    return Finding(
        title=f"Exposed communication takes {least:.1f} of {step:,.1f} ms/step in your script "
        f"({percent(share)})",
        explanation=f"Measured in one profiled step on {max(1, len(of_ranks))} ranks. This is the rank that "
        f"waits least; the slowest waits {max([own, *of_ranks]):,.1f} ms. FP8 shortens the matmuls, not "
        "this.",
        evidence={
            "exposed_ms": least,
            "longest_ms": max([own, *of_ranks]),
            "step_ms": step,
            "share_pct": share,
            "ranks": max(1, len(of_ranks)),
        },
        saving_ms=Saving(low=0.0, high=least, basis="modelled") if kind in LINES else None,
        treatment=Treatment(
            name="hide-communication",
            summary=ACTIONS.get(kind or "", LARGER),
            code=LINES.get(kind or "", LARGER_BATCH),
            kind="sketch",
        ),
    )


def _profiled(communication_ms: float) -> Facts:
    families = {"gemm_fp8": 50.0, "communication": communication_ms}
    parts = Breakdown(families_ms=families, reliable=True)
    observed = Observation(steps_ms=(100.0,) * 3, clock="cuda", breakdown=parts)
    ranks = Ranks(world_size=2, processes=(Rank(rank=0, observed=observed),))
    return example(observed=observed, distributed=Distributed(world_size=2, wrapper="DDP"), ranks=ranks)


FIRES = _profiled(communication_ms=25.0)
SILENT = _profiled(communication_ms=4.0)
