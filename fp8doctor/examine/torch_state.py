"""State of torch in this process: torch.compile and the caching allocator.

Reads only what is loaded, and creates no CUDA context.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from fp8doctor.facts import Dynamo
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks import torch_private

AT_MOST = 3
"""Most failures to record."""


def examine_dynamo(gaps: dict[str, str]) -> Dynamo:
    """Read Dynamo's switches and counters, or its variables if it is not loaded."""
    config = torch_private.config()
    if config is None:
        suppress = bool(os.environ.get("TORCHDYNAMO_SUPPRESS_ERRORS"))
        counted: dict[str, Any] = {"stance": "default", "frames_total": 0, "frames_ok": 0, "failures": ()}
        return Dynamo(disabled=disabled_by_variable(), suppress_errors=suppress, **counted)
    stance = getattr(torch_private.stance(), "stance", None)
    frames, metrics = torch_private.counters("frames"), torch_private.compilation_metrics()
    if stance is None or frames is None or metrics is None:
        gaps["training.dynamo"] = (
            "this torch keeps Dynamo's stance, counters or metrics where 2.6 to 2.15 do not"
        )
    frames = frames or {}
    return Dynamo(
        disabled=bool(config.disable),
        suppress_errors=bool(config.suppress_errors),
        stance=stance or "default",
        frames_total=int(frames.get("total", 0)),
        frames_ok=int(frames.get("ok", 0)),
        failures=failures(metrics or ()),
        recompile_limit=getattr(
            config, "recompile_limit", getattr(config, "cache_size_limit", None)
        ),  # the former from torch 2.7 on
    )


def compiled_nothing() -> bool:
    """Tell if Dynamo is on and has not tried to compile a frame.

    Frames loaded from packaged code are not counted, so False if there may be any.
    """
    state = examine_dynamo({})
    config = torch_private.config()
    switched = state.disabled or state.stance != "default" or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    tried = torch_private.frames_tried()
    packaged = getattr(config, "caching_precompile", False)
    return not (switched or tried or packaged or state.frames_total)


def disabled_by_variable() -> bool:
    """Tell if ``TORCH_COMPILE_DISABLE`` disables Dynamo: any value before torch 2.8."""
    value = os.environ.get("TORCH_COMPILE_DISABLE")
    return value == "1" if torch.__version__ >= "2.8" else bool(value)


def failures(metrics: Iterable[Any]) -> tuple[str, ...]:
    failed = [each for each in tuple(metrics) if getattr(each, "fail_type", None)]
    heads = ((each.fail_reason or "").strip().splitlines()[:2] for each in failed)  # backend and exception
    reasons = (scrub(" ".join(map(str.strip, head))) for head in heads)
    pairs = zip(failed, reasons, strict=True)
    return tuple(dict.fromkeys(f"{each.fail_type}: {reason}" for each, reason in pairs))[:AT_MOST]


def examine_allocator(gaps: dict[str, str]) -> int | None:
    """Count how often the allocator freed its cache and retried.

    None before CUDA is initialized. Only torch's native allocator counts: cudaMallocAsync always says zero,
    and a user's own raises.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    retries: int | None = NOT_RECORDED
    try:
        backend = torch.cuda.get_allocator_backend()
        if backend == "native":
            devices = range(torch.cuda.device_count())
            retries = sum(torch.cuda.memory_stats(each)["num_alloc_retries"] for each in devices)
        else:
            gaps["training.alloc_retries"] = f"the allocator {backend} does not count its retries"
    except (RuntimeError, KeyError) as error:
        gaps["training.alloc_retries"] = scrub(f"the allocator's counters cannot be read: {error}")
    return retries
