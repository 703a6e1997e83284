"""The GPU's memory is full, and the allocator retries

What it finds. CUDA's caching allocator ran out of memory, returned its cache and asked again.

Why it matters. PyTorch keeps freed memory to reuse it without asking the driver. If the GPU is full, or free
only in small pieces, cudaMalloc fails. The allocator then waits for the GPU, returns every cached block with
cudaFree and maps new ones. Each retry stalls the step for milliseconds to seconds, in FP8 as in BF16. If only
the FP8 run is so full, this looks like slow FP8: one user's BF16 trained at 9,080 words/s, FP8 with retries
at 2,010.

Fix. Let segments grow, so memory is not free in small pieces. If it is full, use a smaller micro-batch or
checkpointing.

    python train.py                                                    # before

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py   # after

When to ignore it. If the retries happened only at the start, and the step itself has none.

How it is detected, and limits. fp8doctor reads `num_alloc_retries` before it starts its own work, and while
your step warms up in the trial. The latter counts only if the step alone fills 85% of the GPU, because the
trial's copies need memory too.

References. That run used 87% of the memory, BF16 80%: https://github.com/facebookresearch/lingua/issues/56
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm_if_any
from fp8doctor.analysis.memory import estimated_peak
from fp8doctor.facts import Arm, ArmCut, ArmName, Facts, Gpu, if_recorded, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

FULL = 0.85
"""Share of the memory from which the step fills it, not the trial's copies; the page's FP8 run used 87%."""

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that configure the allocator; torch 2.9 adds the second name."""


@check("MEM002", "allocator-retries", area="memory", severity="warning")
def allocator_retries(facts: Facts) -> Finding | NotApplicable | None:
    own, step = facts.training.alloc_retries, retries_of_the_step(facts)
    if own is None and step is None:
        return NotApplicable(reason="no CUDA memory is in use")
    if not own and not step:
        return None
    now = arm_if_any(facts, ArmName.AS_IS)
    memory_gib, peak_gib = gpu_gib(facts), peak_of(now) if now else None
    peak = f" The step peaks at {peak_gib:.1f} of {memory_gib:.0f} GiB." if peak_gib and memory_gib else ""
    when = f"{plural(own, 'time')} so far" if own else f"{plural(step or 0, 'time')} in the warm-up"
    return Finding(
        title=f"{'The GPU had too little free memory' if own else 'The step filled the GPU'}: the allocator "
        f"retried {when}",
        explanation="Each time it waits for the GPU and returns its whole cache to the driver, which "
        f"stalls the step.{peak}",
        evidence={
            "retries_in_this_process": own,
            "retries_of_the_step": step,
            "peak_gib": peak_gib,
            "gpu_gib": memory_gib,
        },
        treatment=(free_memory(facts) if own else None) or treatment(facts.environment.variables),
    )


def retries_of_the_step(facts: Facts) -> int | None:
    """Count retries while the step warmed up, if it alone fills the GPU; None if unknown."""
    now, memory_gib = arm_if_any(facts, ArmName.AS_IS), gpu_gib(facts)
    retries = [n for cut in now.cuts if (n := cut.get("alloc_retries")) is not None] if now else []
    if now is None or not retries or not (peak_gib := peak_of(now)) or not memory_gib:
        return None
    return max(retries) if peak_gib >= FULL * memory_gib else 0


def peak_of(timed: Arm) -> float | None:
    """Return the peak of a variant; None if unknown."""
    return timed.peak_gib if recorded(timed, "peak_gib") else None


def gpu_gib(facts: Facts) -> float | None:
    """Return the memory of the first visible GPU; None if unknown."""
    gpu = next((gpu for gpu in facts.get("gpus", ()) if gpu.visible), None)
    return gpu.get("memory_gib") if gpu else None


def free_memory(facts: Facts) -> Treatment | None:
    """Propose to free memory that this step does not need; None if it may need it all."""
    peak, memory_gib = if_recorded(estimated_peak, facts), gpu_gib(facts)
    if peak is None or peak.activations is None or not memory_gib or peak.gib >= FULL * memory_gib:
        return None
    return Treatment(
        name="free-memory",
        summary=f"free the GPU's memory first: the step needs about {peak.gib:.1f} of {memory_gib:.0f} GiB "
        "(estimated), so another process or tensors of this one hold the rest",
        code="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv   # other processes\n"
        "# for this one: print(torch.cuda.memory_summary()) where training begins",
        kind="shell",
    )


def treatment(variables: dict[str, str]) -> Treatment:
    """Propose segments that grow; if they already do, less memory."""
    if any("expandable_segments:True" in variables.get(name, "") for name in SETTINGS):
        return Treatment(
            name="less-memory",
            summary="halve the micro-batch and accumulate twice as often, or checkpoint activations",
            code="TrainingArguments(..., per_device_train_batch_size=BATCH // 2, "
            "gradient_accumulation_steps=2 * STEPS)",
        )
    return Treatment(
        name="expandable-segments",
        summary="use expandable segments (set before torch is imported); if retries stay, free what "
        "nvidia-smi lists under other processes, or use a smaller micro-batch",
        code="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _job(retries: int) -> Facts:
    arms = (Arm(name=ArmName.AS_IS, tried=True, peak_gib=76.0, cuts=(ArmCut(alloc_retries=retries),)),)
    gpus = (Gpu(visible=True, memory_gib=79.1),)
    return example(gpus=gpus, variables={}, alloc_retries=retries, device="cuda", arms=arms)


FIRES = _job(retries=12)
SILENT = _job(retries=0)
