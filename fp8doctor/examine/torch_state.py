"""State of torch in this process: torch.compile and the caching allocator.

Reads only what is loaded, and creates no CUDA context.
"""

import os
from contextlib import suppress
from typing import Any

import torch

from fp8doctor.facts import Dynamo
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks import torch_private


def examine_dynamo(gaps: dict[str, str]) -> Dynamo:
    """Read Dynamo's switch and counters, or its variable if it is not loaded."""
    config, frames = torch_private.config(), torch_private.counters("frames")
    if config is None:  # any value of the variable disables it before torch 2.8
        value = os.environ.get("TORCH_COMPILE_DISABLE")
        disabled = value == "1" if torch.__version__ >= "2.8" else bool(value)
        return Dynamo(disabled=disabled, frames_total=0, frames_ok=0)
    if frames is None:
        gaps["training.dynamo"] = "this torch keeps Dynamo's counters where 2.6 to 2.15 do not"
        frames = {}
    return Dynamo(
        disabled=bool(config.disable),
        frames_total=int(frames.get("total", 0)),
        frames_ok=int(frames.get("ok", 0)),
        recompile_limit=getattr(config, "recompile_limit", None) or config.cache_size_limit,  # of torch 2.6
    )


def compiled_nothing() -> bool:
    """Tell if Dynamo is on and has not tried to compile a frame.

    Frames loaded from packaged code are not counted, so False if there may be any.
    """
    state = examine_dynamo({})
    config, stance = torch_private.config(), getattr(torch_private.stance(), "stance", "default")
    switched = state.disabled or stance != "default" or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    tried = torch_private.frames_tried()
    packaged = getattr(config, "caching_precompile", False)
    return not (switched or tried or packaged or state.frames_total)


def examine_allocator(gaps: dict[str, str]) -> Any:
    """Count how often the allocator freed its cache and retried; ``NOT_RECORDED`` if it does not tell.

    None before CUDA is initialized. Only torch's native allocator counts: cudaMallocAsync always says zero,
    and a user's own raises.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    backend = torch.cuda.get_allocator_backend()
    if backend == "native":
        with suppress(RuntimeError, KeyError):
            devices = range(torch.cuda.device_count())
            return sum(torch.cuda.memory_stats(each)["num_alloc_retries"] for each in devices)
    gaps["training.alloc_retries"] = f"the allocator ({backend}) does not tell how often it retried"
    return NOT_RECORDED
