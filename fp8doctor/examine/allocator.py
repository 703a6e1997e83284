"""CUDA's caching allocator in this process. Reads its counters and creates no CUDA context."""

from __future__ import annotations

import torch

from fp8doctor.record import NOT_RECORDED
from fp8doctor.scrub import scrub


def examine_allocator(gaps: dict[str, str]) -> int | None:
    """Times the allocator had to give its cache back and ask the GPU again so far, on all devices together.

    None before CUDA is initialized. Only torch's native allocator counts them: cudaMallocAsync always says zero, and one
    of the user's own raises.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    retries: int | None = NOT_RECORDED
    try:
        backend = torch.cuda.get_allocator_backend()
        if backend == "native":
            retries = sum(torch.cuda.memory_stats(device)["num_alloc_retries"] for device in range(torch.cuda.device_count()))
        else:
            gaps["training.alloc_retries"] = f"the allocator {backend} does not count its retries"
    except (RuntimeError, KeyError) as error:
        gaps["training.alloc_retries"] = scrub(f"the allocator's counters cannot be read: {error}")
    return retries
