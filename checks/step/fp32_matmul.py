"""The step has matmuls in fp32

What it finds. Kernels that multiply matrices in fp32 or TF32 take 3% of the step or more.

Why it matters. An fp32 matmul runs at a fifteenth of BF16's rate (TF32 at half of it), and FP8 does nothing
for it. The usual causes are adapters or a head left in fp32, and an autocast that ends too early. Or a
product converts its operands to fp32 on purpose. Nothing warns you. In one LoRA job, fp32 adapters took 40.3
ms/step.

Fix. Keep the weights in BF16, or run the whole forward and the loss under autocast. TF32 is cheaper than
fp32.

    logits = hidden.float() @ head.weight.float().T  # before

    logits = (hidden @ head.weight.T).float()        # after: the product in BF16

When to ignore it. If you need the fp32 precision there. Small parts in fp32 on purpose (a router, rotary
angles) stay far below the threshold.

How it is detected, and limits. fp8doctor sums the fp32 kernels of a profiled step on a GPU, and names the
modules that launched them outside compiled regions. MEM004 covers attention without a fused kernel.

References. `h200-lora`. H100 SXM datasheet, dense: 67 TFLOP/s in fp32, 495 in TF32, 989 in BF16.
https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import autocast_of
from fp8doctor.analysis.layers import in_words
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import SHOWN_MS, profiled_on_gpu
from fp8doctor.analysis.treatment_table import AUTOCAST_BF16
from fp8doctor.facts import ArmName, Facts, ModuleTime, if_recorded
from fp8doctor.facts.examples import example, float8, profiled
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

SMALL_PCT = 100 * EVEN
"""Percent of the step below which fp32 matmuls are not reported: what fp8doctor calls even."""

NAMED = 3
"""Modules that are named. A choice of length."""


@check("STP004", "fp32-matmul", area="step", severity="warning", explained_by=("LORA002", "MEM003"))
def fp32_matmul(facts: Facts) -> Finding | NotApplicable | None:
    profiled = profiled_on_gpu(facts)
    if isinstance(profiled, NotApplicable):
        return profiled
    _, found, step_ms = profiled
    fp32 = found.families_ms.get("gemm_fp32", 0.0)
    share = 100 * fp32 / step_ms
    if share < SMALL_PCT:
        return None
    most = sorted(
        (each for each in found.modules if each.families_ms.get("gemm_fp32", 0.0) >= SHOWN_MS),
        key=lambda each: -each.families_ms["gemm_fp32"],
    )
    weights = [linear.name for linear in facts.network.linears if linear.multiplies_in == "float32"]
    names = [each.name for each in most] or weights
    launched = ", ".join(
        f"{in_words(each.name, facts.network)} ({each.families_ms['gemm_fp32']:,.1f} ms)"
        for each in most[:NAMED]
    )
    stored = (
        f"{plural(len(weights), 'Linear')} {'has' if len(weights) == 1 else 'have'} fp32 weights; the first "
        f"is {in_words(weights[0], facts.network)}"
        if weights
        else ""
    )
    where = (
        f"The launching modules: {launched}."
        if launched
        else f"{stored}."
        if stored
        else "No Linear has fp32 weights: the operands are converted to fp32 before the product."
    )
    return Finding(
        title=f"Matmuls in fp32 take {fp32:,.1f} ms, {percent(share)} of the step",
        explanation=f"In BF16 the same products take a fraction of this. {where}",
        evidence={
            "gemm_fp32_ms": fp32,
            "share_pct": share,
            "step_ms": step_ms,
            "modules": tuple(names[:NAMED]),
            "fp32_linears": len(weights),
        },
        treatment=treatment(facts, in_fp32=bool(weights)),
    )


def treatment(facts: Facts, *, in_fp32: bool) -> Treatment:
    """Propose autocast, or BF16 weights if some are fp32; under autocast, the place that leaves it."""
    if if_recorded(autocast_of, facts) is None:
        code = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = compute_loss(model, batch)'
        return Treatment(
            name=AUTOCAST_BF16,
            summary="run forward and loss under BF16 autocast, or "
            + ("keep the weights in BF16" if in_fp32 else "convert no operand to fp32"),
            code=code,
        )
    code = "output = operand.bfloat16() @ weight.bfloat16()   # and no autocast(enabled=False) around it"
    return Treatment(
        name="product-in-bf16",
        summary="compute the product in BF16, and convert its result if you need fp32",
        code=code,
    )


def _head_in_fp32(fp32_ms: float) -> Facts:
    """A decoder whose head multiplies in fp32, with invented times."""
    families = {"gemm_fp8": 30.0, "gemm_fp32": fp32_ms, "cast": 6.0, "attention": 10.0, "pointwise": 12.0}
    modules = (ModuleTime(name="head", families_ms={"gemm_fp32": fp32_ms}),)
    arms = (profiled(ArmName.AS_IS, families, modules=modules),)
    head = float8("head", use="none", dtype="float32")
    return example(linears=(head,), wrappers=(), autocast=None, device="cuda", arms=arms)


FIRES = _head_in_fp32(fp32_ms=14.0)
SILENT = _head_in_fp32(fp32_ms=0.4)
