"""Every FP8 Linear compiled by itself

Looks at: which compile mark covers each torchao FP8 Linear, and whether that mark is its own or one
of a block or model around it.

Why it costs time. The compiler fuses only what it sees in one region. A Float8Linear that is
compiled alone has its own casts fused, but each region begins and ends with a tensor in memory: the
amax and the cast of its input cannot join the norm or the activation that made it, nor the cast of
its gradient the operation before. What is between the Linears runs eagerly. On Llama 3 8B
torchtitan measured 243 TFLOP/s with only the Linears compiled against 297 with whole blocks; BF16,
compiled, did 259, so FP8 lost. Many small regions also cost the host more guards and launches.

What to do. Put the region around the block. Marks inside it do no harm: the compiler traces through
them.

    for m in model.modules():                        # before: one region for each Linear
        if isinstance(m, Float8Linear): m.compile()
    for block in model.layers: block.compile()       # after: one region for each block

A head or another layer beside the blocks may well be compiled alone.

Evidence: https://github.com/pytorch/torchtitan/issues/778
https://github.com/pytorch/torchtitan/issues/786 (387 to 126 TFLOP/s, with checkpointing). Counted
on a CPU with torch 2.13 and torchao 0.18: a block of two Linears is two graphs when they are
compiled alone, and one when the block is, marks inside or not.
"""

from __future__ import annotations

from fp8doctor.analysis.compile_coverage import (
    BESIDE_AT_MOST,
    compile_treatment,
    idle_marks,
    is_below,
    is_inside,
    needs_compile,
)
from fp8doctor.analysis.layers import flops_share_pct
from fp8doctor.facts import Blocks, CompileMark, Facts, Linear, Network, Training
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import percent


@check(
    "CMP004",
    "only-linears-compiled",
    area="compilation",
    severity="warning",
    changes_fp8=True,
    invalidates_model=True,
)
def only_linears_compiled(facts: Facts) -> Finding | NotApplicable | None:
    compiled = [
        linear for linear in facts.network.linears if needs_compile(linear) and linear.compiled is not None
    ]
    if not compiled:
        return NotApplicable(reason="no torchao FP8 Linear is compiled")
    idle = idle_marks(facts)  # what they were to cover is CMP002's
    regions = {mark.name for mark in facts.training.compile_marks if mark not in idle}
    alone = [
        linear
        for linear in compiled
        if is_alone(linear, regions) and not any(is_below(linear, mark.name) for mark in idle)
    ]
    inside = [linear for linear in alone if any(is_inside(linear, each) for each in facts.network.blocks)]
    few_beside = len(alone) - len(inside) <= BESIDE_AT_MOST
    if not inside and few_beside:
        return None
    share = flops_share_pct(alone, facts)
    return Finding(
        title=f"{len(alone)} of {len(compiled)} compiled FP8 Linears are compiled one by one",
        explanation=f"Each is a region of its own ({percent(share)} of the GEMM FLOPs), so that no cast is "
        "fused with the norm or the activation beside it, and what is between the Linears runs eagerly.",
        evidence={
            "compiled_alone": len(alone),
            "compiled_fp8_linears": len(compiled),
            "flops_share_pct": round(share, 1),
            "first": alone[0].name,
        },
        treatment=compile_treatment(facts, inside if few_beside else alone),
    )


def is_alone(linear: Linear, regions: set[str]) -> bool:
    """Whether the layer is a compiled region of its own, with no compiled module around it. The root has none
    around it."""
    if not linear.name or linear.compiled != linear.name:
        return False
    parts = linear.name.split(".")
    return not any(".".join(parts[:i]) in regions for i in range(len(parts)))


def _decoder(*marks: str) -> Facts:
    layer = Linear(
        name="blocks.0.up",
        kind="torchao.float8.float8_linear.Float8Linear",
        stack="torchao",
        use="training",
        weight_class=None,
        flops_share_pct=100.0,
        compiled=marks[-1],
    )
    return Facts(
        network=Network(linears=(layer,), blocks=(Blocks(name="blocks", count=1),)),
        training=Training(compile_marks=tuple(CompileMark(name=name) for name in marks)),
    )


SICK = _decoder("blocks.0.up")
HEALTHY = _decoder("blocks.0", "blocks.0.up")
