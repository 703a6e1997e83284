"""FP8 all-gather without precomputed scales

What it finds. FSDP2 gathers weights in FP8, but their scales were not computed after the optimizer's step.

Why it matters. To cast a shard to FP8, every process needs the largest magnitude of the whole weight. Without
a scale, each weight does its own tiny all-reduce right before its all-gather. These are hundreds of
collectives of four bytes per step, and the computation waits for each one.
`precompute_float8_dynamic_scale_for_fsdp` does them at once. On one H200 a
step took 65.3 ms with it and 70.5 without.

Fix. Add one line after the optimizer's step (torchao). Accelerate adds the call itself.

    optimizer.step()  # before

    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    optimizer.step()  # after
    precompute_float8_dynamic_scale_for_fsdp(model)

When to ignore it. Before the first optimizer step: no weight has a scale yet, and the finding is information.

How it is detected, and limits. fp8doctor looks at the sharded weights for a precomputed scale, and at whether
the optimizer took a step. It does not time the collectives.

References. torchao 0.18 `fsdp_utils.py` (`fsdp_pre_all_gather` reduces the amax if `_precomputed_scale` is
None), run with FSDP2 on a CPU. Recordings `h200-fsdp2` and `h200-fsdp2_no_precompute`.
https://docs.pytorch.org/ao/main/workflows/training.html
https://pytorch.org/blog/training-using-float8-fsdp2/
"""

from __future__ import annotations

from fp8doctor.facts import Distributed, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

CODE = """from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
precompute_float8_dynamic_scale_for_fsdp(model)   # after every optimizer.step()"""


@check(
    "DST002",
    "scale-precompute-missing",
    area="distributed",
    severity="warning",
    changes_fp8=True,
)
def scale_precompute_missing(facts: Facts) -> Finding | NotApplicable | None:
    distributed = facts.training.distributed
    sharded = set(distributed.fsdp2_linears) if distributed else set()
    gathered = [
        each
        for each in facts.network.linears
        if each.name in sharded and each.features.get("float8_all_gather_weight")
    ]
    if not gathered or not distributed:
        return NotApplicable(reason="FSDP2 gathers no weight in FP8")
    without = [linear for linear in gathered if not linear.features.get("precomputed_scale")]
    if not without:
        return None
    stepped, shards = bool(facts.training.optimizer_stepped), distributed.shards or 1
    return Finding(
        severity=None if stepped else "info",
        title=f"{len(without)} of {len(gathered)} weights gathered in FP8 have no precomputed scale",
        explanation=f"Each reduces its own scale before its all-gather: {len(without)} in each forward and "
        "again in each backward."
        + (
            " The optimizer took a step, but nothing computed the scales after it."
            if stepped
            else " fp8doctor saw no optimizer step yet, after which the scales are computed."
        ),
        evidence={
            "without_scale": len(without),
            "float8_all_gather_weights": len(gathered),
            "optimizer_stepped": stepped,
            "shards": shards,
            "first": without[0].name,
        },
        treatment=Treatment(
            name="precompute-scales",
            summary="compute all scales in one call after each optimizer step",
            code=CODE,
        ),
    )


def _stepped(precomputed: bool) -> Facts:
    layer = float8("up", features={"float8_all_gather_weight": True, "precomputed_scale": precomputed})
    distributed = Distributed(fsdp2_linears=("up",), shards=8)
    return example(linears=(layer,), distributed=distributed, optimizer_stepped=True)


FIRES = _stepped(precomputed=False)
SILENT = _stepped(precomputed=True)
