"""Checkpointing costs FP8 more than it costs BF16

What it finds. Activation checkpointing slows FP8 down by a larger factor than BF16.

Why it matters. The recompute runs every FP8 cast of the forward again: amax, scale, convert. A torchao layer
saves its inputs only in 16 bits, so checkpointing saves none of that work. A step that was fast because of
fused casts pays for them twice. With FSDP2, a user reports 3.4x. If the two factors are alike, checkpointing
costs what it costs everywhere.

Fix. Keep what is small and slow to compute, the matmul results and the amax, with a selective policy. A
policy sees torchao's FP8 matmul as `aten.mm`, never as `_scaled_mm`. Tensorwise scaling uses aten.max,
rowwise aten.amax. Measure it: kept tensors take memory.

    from torch.utils.checkpoint import checkpoint
    x = checkpoint(block, x, use_reentrant=False)  # before

    import torch
    from functools import partial
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    save = [torch.ops.aten.mm.default, torch.ops.aten.max.default]
    context = partial(create_selective_checkpoint_contexts, save)
    x = checkpoint(block, x, use_reentrant=False, context_fn=context)  # after

When to ignore it. If you have no memory left for the kept tensors.

How it is detected, and limits. The trial times the step with and without checkpointing, in FP8 and in BF16
with the same compilation, and compares the two factors. It needs a GPU and all four times. For Transformer
Engine it proposes no policy: its matmuls are not torch operators.

References. `h200-checkpointed_needlessly` takes 109.4 ms/step in FP8 with checkpointing and 93.9 ms without,
in BF16 121.4 ms and 99.8 ms, so FP8 pays no more there. 3.4x with FSDP2:
https://github.com/pytorch/ao/issues/2445 https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm_in_time, base_of, ratio_on_screen, uses_fp8
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF
from fp8doctor.facts import Arm, ArmName, Checkpointing, Facts, Trial
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import recipe_of, stack_of
from fp8doctor.registry import check


@check("CKP003", "recomputed-casts", area="checkpointing", severity="warning", costs_of_fp8=True)
def recomputed_casts(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts) or all(each.active is False for each in facts.training.checkpointing):
        return NotApplicable(reason="no FP8 layer under activation checkpointing")
    if facts.trial.device == "cpu":
        return NotApplicable(reason="the trial did not time checkpointing on a GPU")
    fp8, bf16 = pair(facts.trial, CHECKPOINTING_OFF), pair(facts.trial, ArmName.BF16_WITHOUT_CHECKPOINTING)
    if fp8 is None or bf16 is None:
        return NotApplicable(reason="the trial did not time checkpointing in both FP8 and BF16")
    in_fp8, in_bf16 = ratio_on_screen(*fp8), ratio_on_screen(*bf16)
    if in_fp8.low <= in_bf16.high or in_fp8.median - in_bf16.median < EVEN:
        return None
    return Finding(
        title=f"Checkpointing slows FP8 down by {in_fp8.median:.2f}x, but BF16 only by {in_bf16.median:.2f}x",
        explanation=f"With it, the FP8 step takes {fp8[0].step_ms or 0.0:,.1f} instead of "
        f"{fp8[1].step_ms or 0.0:,.1f} ms and runs all casts of the forward again. The BF16 step takes "
        f"{bf16[0].step_ms or 0.0:,.1f} instead of {bf16[1].step_ms or 0.0:,.1f} ms.",
        evidence={
            "fp8_cost_ratio": in_fp8.median,
            "fp8_cost_ratio_low": in_fp8.low,
            "bf16_cost_ratio": in_bf16.median,
            "bf16_cost_ratio_high": in_bf16.high,
            "fp8_step_ms": fp8[0].step_ms,
            "fp8_step_without_ms": fp8[1].step_ms,
        },
        treatment=selective(facts),
    )


def selective(facts: Facts) -> Treatment | None:
    """Keep what a policy sees of the FP8 layers; None for Transformer Engine: no torch operators."""
    fp8 = facts.network.fp8
    gemms = sorted({stack_of(linear).gemm for linear in fp8} - {""})
    if not gemms:
        return None
    rowwise = any(recipe_of(linear).granularity == "row" for linear in fp8)
    saved = [*gemms, "amax" if rowwise else "max"]
    return Treatment(
        name="selective-checkpointing",
        summary="keep the FP8 matmuls' results and the amax",
        code=policy(saved),
    )


def pair(trial: Trial, name: str) -> tuple[Arm, Arm] | None:
    """Return a variant with checkpointing and the named one without, if both were timed."""
    without = arm_in_time(trial, name)
    with_it = base_of(trial, without) if without else None
    return None if without is None or with_it is None else (with_it, without)


def policy(operators: list[str]) -> str:
    """Write a selective policy for non-reentrant checkpoints."""
    return (
        f"save = [{', '.join(f'torch.ops.aten.{each}.default' for each in operators)}]\n"
        "context = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, save)\n"
        "checkpoint(block, x, use_reentrant=False, context_fn=context)"
    )


def _timed(fp8_ms: float) -> Facts:
    arms = (
        variant(ArmName.AS_IS, fp8_ms),
        variant(CHECKPOINTING_OFF, 88.3, base=ArmName.AS_IS),
        variant(ArmName.BF16_COMPILED, 117.5),
        variant(ArmName.BF16_WITHOUT_CHECKPOINTING, 92.7, base=ArmName.BF16_COMPILED),
    )
    regions = (Checkpointing(name="blocks.0", form="wrapper", active=True),)
    return example(linears=(float8(),), checkpointing=regions, device="cuda", arms=arms)


SICK = _timed(fp8_ms=300.0)
HEALTHY = _timed(fp8_ms=105.4)
