"""What a trial leaves in the process as it was: random numbers, Dynamo's counters, and the memory of the GPU."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back every random number generator and Dynamo's counters, whatever the replicas did."""
    from torch._dynamo.utils import counters

    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = _numpy_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    counted = {key: dict(value) for key, value in counters.items()}
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        counters.clear()
        for key, value in counted.items():
            counters[key].update(value)


def _numpy_state() -> object:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def free(device: torch.device) -> None:
    """Give memory back, cuBLAS's workspaces (66 MiB on an H200) included where torch has the private call for it."""
    gc.collect()
    if device.type == "cuda":
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
