"""Checkpointing that the GPU's memory does not need

Activation checkpointing keeps only a region's inputs and runs its forward again in the backward. That is a
third more matmuls, and every FP8 cast of the forward once more. It saves memory; if the step fits without it,
you gain nothing. FP8 makes this more likely: compiled, its peak is below BF16's. One job took 109.4 ms/step
with gradient checkpointing and 93.9 ms without (`h200-checkpointed_needlessly`).

    model.gradient_checkpointing_enable()   # before

    model.gradient_checkpointing_disable()  # after (transformers)
    model.config.use_cache = False          # checkpointing had kept the KV cache off

Keep it for some of the blocks if not all fit. timm and open_clip have `model.set_grad_checkpointing(False)`,
a Trainer `gradient_checkpointing=False`. Before a trial the peak is estimated, and half of the GPU has to
stay free. Ignore it if your longest batches need more memory than this one: the peak is that batch's only.
https://github.com/axolotl-ai-cloud/axolotl/issues/2926
https://docs.pytorch.org/docs/stable/checkpoint.html
"""

import math

from fp8doctor import kit

OFF = kit.treatment_table.CHECKPOINTING_OFF
USABLE = kit.memory.USABLE

FEWEST = 0.25  # share of the blocks that have to be able to keep their activations: a choice
ESTIMATED = 0.5  # share of the GPU that an estimated peak may fill; activations were up to 0.7 off (`memory`)


@kit.check("CKP001", "checkpointing-not-needed", severity="warning")
def checkpointing_not_needed(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    if all(each.active is False for each in facts.training.checkpointing):
        return kit.NotApplicable(reason="no activation checkpointing")
    if (OFF,) in kit.trial_view.TrialView(facts).too_large:
        return None
    if not kit.own_step.ran_on_a_gpu(facts):
        return fits_without(facts)
    alone, plan = (kit.arms.arm(facts, name) for name in (OFF, kit.ArmName.PRESCRIBED))
    without = alone or (plan if plan and OFF in plan.get("treatments", ()) else None)
    gpus = [(gpu, gpu.get("memory_gib")) for gpu in facts.gpus if gpu.visible is not False]
    used = (gpu.other_processes and gpu.get("memory_used_gib") for gpu, _ in gpus)
    free = min((gib - (of or 0.0) for (_, gib), of in zip(gpus, used, strict=True) if gib), default=None)
    if not without or without.peak_gib is None or free is None:
        return fits_without(facts)
    if without.peak_gib > USABLE * free:
        return None
    return kit.Finding(
        title="Activation checkpointing is on, and the step fits without it",
        explanation=f"The step peaks at {without.peak_gib:.1f} GiB without it; this GPU has {free:.1f} GiB "
        "free. Batches longer than the timed one need more.",
        evidence={"peak_without_gib": without.peak_gib, "free_gib": free},
        treatment=kit.treatments.checkpointing_off(facts),
    )


def fits_without(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    """Estimate how many blocks can keep their activations; only a base stored in FP8 may fill the GPU."""
    if any(kit.stack_of(each).under_autocast and each.checkpointed for each in facts.network.fp8):
        return kit.NotApplicable(reason="Transformer Engine's layers are recomputed, which CKP002 looks at")
    found, off = kit.memory.fit(facts), kit.treatments.checkpointing_off(facts)
    then = kit.memory.fit(kit.treatment_table.after(facts, [off]))
    without = then.now if then and then.now.activations is not None else None
    blocks = sum(kit.compile_coverage.recomputed(each, facts) for each in facts.network.blocks)
    if found is None or without is None or not blocks:
        return kit.NotApplicable(reason="no estimate of its memory: that needs blocks and their rows")
    may_fill = USABLE if any(map(kit.stores_fp8, facts.network.linears)) else ESTIMATED
    now, most, room = found.now.gib, without.gib, may_fill * found.gpu_gib
    share = 1.0 if most <= room else (room - now) / (most - now) if most > now else 0.0
    keep = math.floor(share * blocks)
    fits = keep == blocks
    if keep < FEWEST * blocks or (may_fill == ESTIMATED and not fits):
        return None
    step = "and the step fits without it" if fits else f"and {keep} of {blocks} blocks fit without it"
    fewer = kit.Treatment(
        name="checkpoint-fewer-blocks",
        summary=f"checkpoint {blocks - keep} of the {blocks} blocks",
        code=f"# where you checkpoint the blocks: only {blocks - keep} of the {blocks}",
    )
    return kit.Finding(
        title=f"Activation checkpointing is on, {step} (estimated)",
        explanation=f"The estimated peak is {found.now.gib:.1f} GiB, and {without.gib:.1f} GiB without "
        f"checkpointing; the GPU has {found.gpu_gib:.1f}. What a block does not keep, it computes twice.",
        evidence={"blocks": blocks, "blocks_without": keep, "peak_without_gib": round(without.gib, 1)},
        treatment=off if fits else fewer,
    )


def _timed(peak_without_gib: float) -> kit.Facts:
    arms = (
        kit.variant(kit.ArmName.AS_IS, 105.4, peak_gib=7.4),
        kit.variant(OFF, 88.3, base=kit.ArmName.AS_IS, peak_gib=peak_without_gib),
    )
    regions = (kit.Checkpointing(name="model.layers.0", form="huggingface", active=True),)
    gpu = kit.Gpu(memory_gib=79.6, memory_used_gib=0.0, visible=True, other_processes=0)
    return kit.example(gpus=(gpu,), wrappers=(), checkpointing=regions, device="cuda", arms=arms)


FIRES = _timed(peak_without_gib=17.2)
SILENT = _timed(peak_without_gib=76.0)
