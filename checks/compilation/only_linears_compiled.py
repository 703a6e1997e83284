"""Every FP8 Linear is compiled by itself

What it finds. Compiled FP8 Linears are regions of their own, instead of parts of a compiled block or model.

Why it matters. The compiler fuses only what it sees in one region. If a Float8Linear is compiled alone, its
own casts are fused, but the region begins and ends with a tensor in memory. The amax and cast of its input
cannot join the norm or activation before it, nor the cast of its gradient the operation before that.
Everything between the Linears is not compiled. On Llama 3 8B, torchtitan measured 243 TFLOP/s with only the
Linears compiled, 297 with whole blocks, and 259 for compiled BF16. Many small regions also cost host time.

Fix. Compile the block. Marks inside it do no harm: the compiler traces through them.

    for module in model.modules():  # before: one region per Linear
        if isinstance(module, Float8Linear):
            module.compile()

    for block in model.layers:      # after: one region per block
        block.compile()

When to ignore it. For a head or a few layers outside the blocks: they are fine, and not reported.

How it is detected, and limits. fp8doctor finds the compile mark that covers each torchao FP8 Linear, and
checks whether a module around it is compiled. It does not time the difference by itself; the trial does.

References. https://github.com/pytorch/torchtitan/issues/778 https://github.com/pytorch/torchtitan/issues/786
(387 to 126 TFLOP/s, with checkpointing). On a CPU (torch 2.13, torchao 0.18), a block of two Linears is two
graphs if they are compiled alone, and one if the block is.
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
from fp8doctor.analysis.layers import flops_share_pct, named
from fp8doctor.facts import Blocks, CompileMark, Facts, Linear
from fp8doctor.facts.examples import example, float8
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
    compiled = [each for each in facts.network.linears if needs_compile(each) and each.compiled is not None]
    if not compiled:
        return NotApplicable(reason="no torchao FP8 Linear is compiled")
    idle = idle_marks(facts)  # CMP002 covers their layers
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
        title=f"{len(alone)} of {len(compiled)} compiled FP8 Linears are compiled one by one"
        f"{named(alone, len(compiled))}",
        explanation=f"Each is a region of its own ({percent(share)} of the matmul FLOPs). No cast is fused "
        "with the norm or activation next to it, and everything between the Linears is not compiled.",
        evidence={
            "compiled_alone": len(alone),
            "compiled_fp8_linears": len(compiled),
            "flops_share_pct": round(share, 1),
            "first": alone[0].name,
        },
        treatment=compile_treatment(facts, inside if few_beside else alone),
    )


def is_alone(linear: Linear, regions: set[str]) -> bool:
    """Whether the layer is a compiled region of its own. Nothing is around the root."""
    if not linear.name or linear.compiled != linear.name:
        return False
    parts = linear.name.split(".")
    return not any(".".join(parts[:i]) in regions for i in range(len(parts)))


def _decoder(*names: str) -> Facts:
    linears, blocks = (float8(compiled=names[-1]),), (Blocks(name="blocks", count=1),)
    marks = tuple(CompileMark(name=name) for name in names)
    return example(linears=linears, blocks=blocks, compile_marks=marks)


FIRES = _decoder("blocks.0.up")
SILENT = _decoder("blocks.0", "blocks.0.up")
