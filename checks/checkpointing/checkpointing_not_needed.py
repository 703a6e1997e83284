"""Checkpointing that the GPU's memory does not need

What it finds. Activation checkpointing is on, costs time, and the step would fit into memory without it.

Why it matters. Checkpointing keeps only a region's inputs and runs its forward again in the backward. That is
a third more matmuls, and every FP8 cast of the forward once more. It saves memory; if the step fits without
it, you gain nothing. FP8 makes this more likely: compiled, its peak is below BF16's. One job took 109.4
ms/step with checkpointing and 93.9 ms without.

Fix. Switch it off, or keep it for some of the blocks if not all fit. timm and open_clip have
`model.set_grad_checkpointing(False)`, a Trainer `gradient_checkpointing=False`.

    model.gradient_checkpointing_enable()   # before

    model.gradient_checkpointing_disable()  # after (transformers)
    model.config.use_cache = False          # checkpointing had kept the KV cache off

When to ignore it. If your longest batches need more memory than the one that was timed.

How it is detected, and limits. The trial times the step with and without checkpointing, and predicts the peak
without it at full depth, for the timed batch only. fp8doctor compares this with the GPU's free memory.

References. `h200-checkpointed_needlessly`. https://github.com/axolotl-ai-cloud/axolotl/issues/2926
https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import all_too_large, arm_in_time, base_of, ratio
from fp8doctor.analysis.fp8_weights import USABLE
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF
from fp8doctor.diagnosis.treatments import checkpointing_off
from fp8doctor.facts import ArmName, Blocks, Checkpointing, Facts, Gpu
from fp8doctor.facts.examples import example, variant
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check


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
        return NotApplicable(reason="the trial did not measure step and memory without it on a GPU")
    cost = ratio(with_it, without)
    if cost.low <= 1 or cost.median - 1 < EVEN or without.peak_gib > USABLE * free:
        return None
    return Finding(
        title="Activation checkpointing is on, and the step fits without it",
        explanation=f"The step peaks at {without.peak_gib:.1f} GiB without it and at {with_it.peak_gib:.1f} "
        f"GiB with it; this GPU has {free:.1f} GiB free. Batches longer than the timed one need more.",
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
    """Compute the memory for this job on the smallest visible GPU, without what other processes use."""
    free = []
    for gpu in gpus:
        if gpu.visible is not False and (memory_gib := gpu.get("memory_gib")):
            used = gpu.get("memory_used_gib") if gpu.other_processes else None
            free.append(memory_gib - (used or 0.0))
    return min(free, default=None)


def _timed(peak_without_gib: float) -> Facts:
    arms = (
        variant(ArmName.AS_IS, 105.4, peak_gib=7.4),
        variant(CHECKPOINTING_OFF, 88.3, base=ArmName.AS_IS, peak_gib=peak_without_gib),
    )
    regions = (Checkpointing(name="model.layers.0", form="huggingface", active=True),)
    blocks = (Blocks(name="model.layers", count=24),)
    gpu = Gpu(memory_gib=79.6, memory_used_gib=0.0, visible=True, other_processes=0)
    return example(gpus=(gpu,), blocks=blocks, wrappers=(), checkpointing=regions, device="cuda", arms=arms)


FIRES = _timed(peak_without_gib=17.2)
SILENT = _timed(peak_without_gib=76.0)
