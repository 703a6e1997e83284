"""CUDA's caching allocator in this process. Reads its counters and creates no CUDA context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

_by_trials = 0
"""Retries that trials in this process caused, which are none of the user's."""


def examine_allocator(gaps: dict[str, str]) -> int | None:
    """Count how often the allocator gave its cache back and asked the GPU again, outside trials.

    None before CUDA is initialized. Only torch's native allocator counts them: cudaMallocAsync always says
    zero, and one of the user's own raises.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    retries: int | None = NOT_RECORDED
    try:
        backend = torch.cuda.get_allocator_backend()
        if backend == "native":
            retries = _counted() - _by_trials
        else:
            gaps["training.alloc_retries"] = f"the allocator {backend} does not count its retries"
    except (RuntimeError, KeyError) as error:
        gaps["training.alloc_retries"] = scrub(f"the allocator's counters cannot be read: {error}")
    return retries


@contextmanager
def not_the_users() -> Iterator[None]:
    """Retries inside are those of a trial, and `examine_allocator` leaves them out."""
    global _by_trials
    before = _counted_or_none()
    try:
        yield
    finally:
        after = _counted_or_none()
        if before is not None and after is not None:
            _by_trials += after - before


def _counted_or_none() -> int | None:
    try:
        return _counted() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    except (RuntimeError, KeyError):
        return None


def _counted() -> int:
    return sum(
        torch.cuda.memory_stats(device)["num_alloc_retries"] for device in range(torch.cuda.device_count())
    )
