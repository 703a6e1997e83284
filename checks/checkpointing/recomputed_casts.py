"""Checkpointing costs FP8 more than it costs BF16

Looks at: the measured cost of activation checkpointing in FP8, and in BF16 with the same compile
state: each the ratio of two steps that were timed in turn.

Why it costs time. The recompute runs every FP8 cast of the forward again: amax, scale, convert. A
torchao layer saves its inputs in 16 bits only, so checkpointing saves none of that work, and a step
that was fast because casts were fused pays for them twice. If the two ratios are alike, nothing
is wrong and checkpointing costs what it costs everywhere.

What to do. Save what is cheap to keep and dear to compute: the GEMM results and the amax, by a
selective policy. A policy sees torchao's FP8 matmul as `aten.mm`, never as `_scaled_mm`. Measure
it: kept tensors take memory.

    checkpoint(block, x, use_reentrant=False)                                       # before
    save = [torch.ops.aten.mm.default, torch.ops.aten.max.default]                  # after
    context = partial(create_selective_checkpoint_contexts, save)
    checkpoint(block, x, use_reentrant=False, context_fn=context)

Tensorwise scaling takes aten.max; rowwise takes aten.amax.

Evidence: `h200-checkpointed_needlessly` has 109.4 ms a step in FP8 with it and 93.9 ms without, in
BF16 121.4 ms and 99.8 ms, so FP8 pays no more there. With FSDP2 3.4x is reported:
https://github.com/pytorch/ao/issues/2445
https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm_in_time, base_of, ratio_on_screen, uses_fp8
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF
from fp8doctor.facts import Arm, Checkpointing, Facts, Linear, Network, Training, Trial
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import recipe_of, stack_of
from fp8doctor.registry import check


@check("CKP003", "recomputed-casts", area="checkpointing", severity="warning")
def recomputed_casts(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts) or all(each.active is False for each in facts.training.checkpointing):
        return NotApplicable(reason="no FP8 layer under activation checkpointing")
    if facts.trial.device == "cpu":
        return NotApplicable(reason="the cost of checkpointing was not measured on a GPU")
    fp8, bf16 = pair(facts.trial, CHECKPOINTING_OFF), pair(facts.trial, ArmName.BF16_WITHOUT_CHECKPOINTING)
    if fp8 is None or bf16 is None:
        return NotApplicable(reason="the cost of checkpointing was not measured in both FP8 and BF16")
    in_fp8, in_bf16 = ratio_on_screen(*fp8), ratio_on_screen(*bf16)
    if in_fp8.low <= in_bf16.high or in_fp8.median - in_bf16.median < EVEN:
        return None
    return Finding(
        title=f"Checkpointing costs FP8 {in_fp8.median:.2f}x and BF16 {in_bf16.median:.2f}x",
        explanation=f"Its recompute takes {fp8[0].step_ms or 0.0:,.1f} instead of "
        f"{fp8[1].step_ms or 0.0:,.1f} ms a step in FP8, and runs all casts of the "
        f"forward again; in BF16 {bf16[0].step_ms or 0.0:,.1f} "
        f"instead of {bf16[1].step_ms or 0.0:,.1f} ms.",
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
    """Keep what a policy sees of the FP8 layers; None for Transformer Engine's, whose GEMMs are no operators
    of torch."""
    fp8 = [linear for linear in facts.network.linears if linear.use == "training"]
    gemms = sorted({stack_of(linear).gemm for linear in fp8} - {""})
    if not gemms:
        return None
    rowwise = any(recipe_of(linear).granularity == "row" for linear in fp8)
    saved = [*gemms, "amax" if rowwise else "max"]
    return Treatment(
        name="selective-checkpointing",
        summary="keep the results of the FP8 GEMMs and the amax",
        code=policy(saved),
    )


def pair(trial: Trial, name: str) -> tuple[Arm, Arm] | None:
    """Return an arm that checkpoints and the one of this name that takes it away, if both were timed."""
    without = arm_in_time(trial, name)
    with_it = base_of(trial, without) if without else None
    return None if without is None or with_it is None else (with_it, without)


def policy(operators: list[str]) -> str:
    """Write a selective policy for checkpoints that are not reentrant."""
    return (
        f"save = [{', '.join(f'torch.ops.aten.{each}.default' for each in operators)}]\n"
        "context = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, save)\n"
        "checkpoint(block, x, use_reentrant=False, context_fn=context)"
    )


def _timed(fp8_ms: float) -> Facts:
    steps = (
        (ArmName.AS_IS, None, fp8_ms),
        (CHECKPOINTING_OFF, ArmName.AS_IS, 88.3),
        (ArmName.BF16_COMPILED, None, 117.5),
        (ArmName.BF16_WITHOUT_CHECKPOINTING, ArmName.BF16_COMPILED, 92.7),
    )
    arms = tuple(
        Arm(name=name, base=base, tried=True, step_ms=ms, rounds_ms=(ms - 0.1, ms, ms, ms + 0.1))
        for name, base, ms in steps
    )
    return Facts(
        network=Network(linears=(Linear(use="training", stack="torchao", recipe="tensorwise"),)),
        training=Training(checkpointing=(Checkpointing(name="blocks.0", form="wrapper", active=True),)),
        trial=Trial(device="cuda", arms=arms),
    )


SICK = _timed(fp8_ms=300.0)
HEALTHY = _timed(fp8_ms=105.4)
