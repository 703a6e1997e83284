"""The GPU's memory is full, and the allocator retries

PyTorch keeps freed memory to reuse it. If the GPU is full, or free only in small pieces, cudaMalloc fails.
The allocator then waits for the GPU, returns every cached block and maps new ones. Each retry stalls the step
for milliseconds to seconds, in FP8 as in BF16. If only the FP8 run is almost out of memory, this looks like
slow FP8. One user's BF16 trained at 9,080 words/s, FP8 with retries at 2,010.

    python train.py                                                    # before

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py   # after

If it is full and not only in pieces, use a smaller micro-batch or checkpointing. Ignore it if the retries
happened only at the start. Retries in the trial count only if the step alone fills 85% of the GPU, because
the trial's copies need memory too.
https://github.com/facebookresearch/lingua/issues/56
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from fp8doctor import kit

FULL = 0.85
"""Share of the memory from which the step fills it, not the trial's copies; the page's FP8 run used 87%."""

EXPANDABLE = kit.Treatment(
    name="expandable-segments",
    summary="use expandable segments (set before torch is imported); if retries stay, free what "
    "nvidia-smi lists under other processes, or use a smaller micro-batch",
    code="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)


@kit.check("MEM002", "allocator-retries", severity="warning")
def allocator_retries(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    now, memory_gib = kit.arms.arm(facts, kit.ArmName.AS_IS), kit.memory.gpu_gib(facts)
    peak_gib = now.get("peak_gib") if now else None
    own = facts.training.alloc_retries
    if own is None:
        return kit.NotApplicable(reason="no CUDA memory is in use")
    if not own:
        return None
    peak = f" The step peaks at {peak_gib:.1f} of {memory_gib:.0f} GiB." if peak_gib and memory_gib else ""
    return kit.Finding(
        title=f"The GPU had too little free memory: the allocator retried {kit.plural(own, 'time')} so far",
        explanation="Each time it waits for the GPU and returns its whole cache to the driver, which "
        f"stalls the step.{peak}",
        evidence={"retries_in_this_process": own, "peak_gib": peak_gib, "gpu_gib": memory_gib},
        treatment=free_memory(facts, memory_gib) or EXPANDABLE,
    )


def free_memory(facts: kit.Facts, memory_gib: float | None) -> kit.Treatment | None:
    """Propose to free memory that this step does not need; None if it may need it all."""
    peak = kit.if_recorded(kit.memory.estimated_peak, facts)
    if peak is None or peak.activations is None or not memory_gib or peak.gib >= FULL * memory_gib:
        return None
    return kit.Treatment(
        name="free-memory",
        summary=f"free the GPU's memory first: the step needs about {peak.gib:.1f} of {memory_gib:.0f} GiB "
        "(estimated), so another process or tensors of this one hold the rest",
        code="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv   # other processes\n"
        "# for this one: print(torch.cuda.memory_summary()) where training begins",
        kind="shell",
    )


def _job(retries: int) -> kit.Facts:
    arms = (kit.Arm(name=kit.ArmName.AS_IS, tried=True, peak_gib=76.0),)
    gpus = (kit.Gpu(visible=True, memory_gib=79.1),)
    return kit.example(gpus=gpus, variables={}, alloc_retries=retries, device="cuda", arms=arms)


FIRES = _job(retries=12)
SILENT = _job(retries=0)
