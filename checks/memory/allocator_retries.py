"""The GPU's memory is full, and the allocator retries

PyTorch keeps freed memory to reuse it. If the GPU is full, or free only in small pieces, cudaMalloc fails.
The allocator then waits for the GPU, returns every cached block and maps new ones. Each retry stalls the step
for milliseconds to seconds, in FP8 as in BF16. If only the FP8 run is almost out of memory, this looks like
slow FP8. One user's BF16 trained at 9,080 words/s, FP8 with retries at 2,010.

    python train.py                                                    # before

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py   # after

If it is full and not only in pieces, use a smaller micro-batch or checkpointing. Ignore it if the retries
happened only at the start.
https://github.com/facebookresearch/lingua/issues/56
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from fp8doctor import kit


@kit.check("MEM002", "allocator-retries", severity="warning")
def allocator_retries(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    own = facts.training.alloc_retries
    if own is None:
        return kit.NotApplicable(reason="no CUDA memory is in use")
    if not own:
        return None
    return kit.Finding(
        title=f"The GPU had too little free memory: the allocator retried {kit.plural(own, 'time')} so far",
        explanation="Each time it waits for the GPU and gives its cache back, which stalls the step.",
        evidence={"retries_in_this_process": own},
        treatment=kit.Treatment(
            name="expandable-segments",
            summary="free what other processes hold, and use expandable segments (before torch is imported)",
            code="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv\n"
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ),
    )


FIRES = kit.example(variables={}, alloc_retries=12, device="cuda")
SILENT = kit.example(variables={}, alloc_retries=0, device="cuda")
