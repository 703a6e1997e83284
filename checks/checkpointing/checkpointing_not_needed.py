"""Activation checkpointing that the GPU's memory does not need

Looks at: checkpointing that is on, the trial's arm without it, the memory which that arm would use
at full depth, and the memory of the GPU that others leave.

Why it costs time. Checkpointing keeps the inputs of a region only and runs its forward again in the
backward: a third more GEMMs, and every FP8 cast of the forward once more. It buys memory; where the
step fits without it, it buys nothing. FP8 makes that more likely: compiled, it peaks below BF16.

What to do. Switch it off, or keep it for some of the blocks where all of them do not fit.

    model.gradient_checkpointing_enable()      # before
    model.gradient_checkpointing_disable()     # after; gradient_checkpointing=False in a Trainer
    model.config.use_cache = False             # checkpointing had kept transformers' KV cache off
    model.set_grad_checkpointing(False)        # timm, open_clip

The memory was predicted for the batch that was timed. A job with longer ones needs more.

Evidence: `h200-checkpointed_needlessly`: 109.4 ms a step with it and 93.9 ms without.
https://github.com/axolotl-ai-cloud/axolotl/issues/2926
https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import all_too_large, arm_in_time, base_of, ratio
from fp8doctor.analysis.memory import USABLE
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF
from fp8doctor.diagnosis.treatments import checkpointing_off
from fp8doctor.facts import Arm, Blocks, Checkpointing, Facts, Gpu, Network, Training, Trial, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import times


@check("CKP001", "checkpointing-not-needed", area="checkpointing", severity="warning")
def checkpointing_not_needed(facts: Facts) -> Finding | NotApplicable | None:
    if all(each.active is False for each in facts.training.checkpointing):
        return NotApplicable(reason="no activation checkpointing")
    if (CHECKPOINTING_OFF,) in all_too_large(facts.trial):
        return None
    without = arm_in_time(facts.trial, CHECKPOINTING_OFF)
    with_it = base_of(facts.trial, without) if without else None
    free = free_gib(facts.gpus)
    if (
        without is None
        or with_it is None
        or without.peak_gib is None
        or with_it.peak_gib is None
        or free is None
    ):
        return NotApplicable(
            reason="the step without checkpointing, or its memory, was not measured on a GPU"
        )
    cost = ratio(with_it, without)
    if cost.low <= 1 or cost.median - 1 < EVEN or without.peak_gib > USABLE * free:
        return None
    assert with_it.step_ms is not None
    assert without.step_ms is not None
    return Finding(
        title=f"Checkpointing costs {with_it.step_ms - without.step_ms:,.1f} of {with_it.step_ms:,.1f} ms a "
        f"step ({times(with_it.step_ms, without.step_ms)}), and the step fits without it",
        explanation=f"Without it the step peaks at {without.peak_gib:.1f} GiB, with it at "
        f"{with_it.peak_gib:.1f}; {free:.1f} GiB of this GPU are free for it. Longer batches than the one "
        "that was timed need more.",
        evidence={
            "cost_ratio": cost.median,
            "cost_ratio_low": cost.low,
            "cost_ratio_high": cost.high,
            "step_ms": with_it.step_ms,
            "step_without_ms": without.step_ms,
            "peak_gib": with_it.peak_gib,
            "peak_without_gib": without.peak_gib,
            "free_gib": free,
        },
        treatment=checkpointing_off(facts),
    )


def free_gib(gpus: tuple[Gpu, ...]) -> float | None:
    """Compute the memory for this job on the smallest visible GPU. Memory in use counts against it when other
    processes are there."""
    free = []
    for gpu in gpus:
        if gpu.visible is not False and recorded(gpu, "memory_gib") and gpu.memory_gib:
            used = gpu.memory_used_gib if recorded(gpu, "memory_used_gib") and gpu.other_processes else None
            free.append(gpu.memory_gib - (used or 0.0))
    return min(free, default=None)


def _timed(peak_without_gib: float) -> Facts:
    arms = (
        Arm(
            name=ArmName.AS_IS,
            tried=True,
            step_ms=105.4,
            rounds_ms=(105.3, 105.4, 105.4, 105.5),
            peak_gib=7.4,
        ),
        Arm(
            name=CHECKPOINTING_OFF,
            base=ArmName.AS_IS,
            tried=True,
            step_ms=88.3,
            rounds_ms=(88.2, 88.3, 88.3, 88.4),
            peak_gib=peak_without_gib,
        ),
    )
    return Facts(
        gpus=(
            Gpu(name="NVIDIA H100", memory_gib=79.6, memory_used_gib=0.0, visible=True, other_processes=0),
        ),
        network=Network(blocks=(Blocks(name="model.layers", count=24),), wrappers=()),
        training=Training(
            checkpointing=(Checkpointing(name="model.layers.0", form="huggingface", active=True),)
        ),
        trial=Trial(device="cuda", arms=arms),
    )


SICK = _timed(peak_without_gib=17.2)
HEALTHY = _timed(peak_without_gib=76.0)
