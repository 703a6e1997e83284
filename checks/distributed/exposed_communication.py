"""The GPU waits for communication

Looks at: one profiled step of a script of several ranks under `fp8doctor run`. Of it, the time in
which a collective runs on the GPU and nothing else does, on the rank where that is least: the
others wait longer, for the last to arrive.

Why it costs time. All-gathers and reductions are hidden behind GEMMs. FP8 makes the GEMMs shorter
and the bytes that are sent no fewer, so that what BF16 hid comes to light: FP8 then gains less than
its GEMMs do.

What to do. Send less (FP8 all-gather, fewer synchronizations while gradients accumulate), begin
earlier (prefetch, smaller units), or compute more for each byte (a larger batch).

    Float8LinearConfig()                                      # before
    Float8LinearConfig(enable_fsdp_float8_all_gather=True)    # after, FSDP2
    with model.no_sync(): loss.backward()                     # DDP: all micro-batches but the last

Evidence: https://pytorch.org/blog/training-using-float8-fsdp2/
https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from fp8doctor.analysis.rank_comparison import exposed_ms, step_ms, timed_ranks, told
from fp8doctor.analysis.waiting import counts
from fp8doctor.facts import Breakdown, Distributed, Facts, Observation, Rank, Ranks, Training, recorded
from fp8doctor.finding import Finding, NotApplicable, Saving, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent

LINES = {
    "DDP": "with model.no_sync():     # every micro-batch but the last\n    loss.backward()",
    "FSDP2": "Float8LinearConfig(enable_fsdp_float8_all_gather=True)     # at conversion\n"
    "block.set_modules_to_forward_prefetch([next_block])     # of each block",
}
"""Wrapper -> what sends less or begins earlier."""

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
        return NotApplicable(reason="no step was profiled")
    ranks = timed_ranks(facts) if recorded(facts, "ranks") else ()
    of_ranks = [ms for each in ranks if (ms := told(exposed_ms, each.observed)) is not None]
    least = min([own, *of_ranks])
    share = 100 * least / step
    if not counts(least, step):
        return None
    kind = distributed.wrapper if recorded(distributed, "wrapper") else None
    return Finding(
        title=f"Communication that no compute hides takes {least:.1f} of {step:,.1f} ms ({percent(share)})",
        explanation=f"Seen in one profiled step on each of {max(1, len(of_ranks))} ranks; this is the rank "
        "that waits least, and the longest waits "
        f"{max([own, *of_ranks]):,.1f} ms. FP8 shortens the GEMMs beside it and not this.",
        evidence={
            "exposed_ms": least,
            "longest_ms": max([own, *of_ranks]),
            "step_ms": step,
            "share_pct": share,
            "ranks": max(1, len(of_ranks)),
        },
        saving_ms=Saving(low=0.0, high=least, basis="measured"),
        treatment=Treatment(
            name="hide-communication",
            summary="send less, begin earlier, or compute more for each byte",
            code="\n".join(filter(None, (LINES.get(kind or ""), LARGER_BATCH))),
            kind="sketch",
        ),
    )


def _profiled(communication_ms: float) -> Facts:
    families = {"gemm_fp8": 50.0, "communication": communication_ms}
    observed = Observation(
        steps_ms=(100.0,) * 3, clock="cuda", breakdown=Breakdown(families_ms=families, reliable=True)
    )
    return Facts(
        observed=observed,
        training=Training(distributed=Distributed(world_size=2, wrapper="DDP")),
        ranks=Ranks(world_size=2, processes=(Rank(rank=0, observed=observed),)),
    )


SICK = _profiled(communication_ms=25.0)
HEALTHY = _profiled(communication_ms=4.0)
