"""The state of a job and its process in small values, taken before and after a trial. What differs is its
harm.

Tensors are known by identity, version counter and a checksum of their bytes, taken on their own device.
Measured on two CPU cores: 0.1 s per GiB, and 13 ms for the 291 tensors of an 8B Llama beside their bytes; on
a GPU the bytes are read once at its bandwidth (16 GiB in 5 ms at 3.3 TB/s, computed). The checksum is a sum
of 64-bit words: it sees writes that no version counter counts (``.data``, kernels called by address), but not
a permutation.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from fp8doctor.facts import Trial, recorded
from fp8doctor.loading.job import Job
from fp8doctor.stacks.held_tensors import tensors
from fp8doctor.stacks.tensors import has_data
from fp8doctor.trial.state import settings
from fp8doctor.trial.state.optimizers import inner
from fp8doctor.trial.state.reached import reached

FOLDER, MEMORY = "files in the current folder", "memory of the GPU"

CONTEXT = "the GPU's context in this process, which is unusable now"

NO_DOUBT = frozenset({FOLDER, MEMORY})
"""Changes that another process or thread may have made, and that disturb no timing."""

MEMORY_SLACK = 64 * 2**20
"""Bytes of a GPU that may be held more than before: workspaces of cuBLAS and small constants. A convention of
this tool."""

Digest = dict[str, Any]
"""Item -> a value to compare."""

LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""Folders that libraries are installed in."""

WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def digest(job: Job) -> Digest:
    """Take the state now, by the name of each item."""
    return {
        **of_the_users(job),
        "settings": settings.read(),
        "warning filters": list(warnings.filters),
        "threads": {thread.ident for thread in threading.enumerate() if not _of_a_library(thread)},
        "child processes": _children(),
        "open files": _open_files(),
        FOLDER: _folder(),
        MEMORY: _allocated(),
    }


def of_the_users(job: Job) -> Digest:
    """Take the part of the state that is the user's own: tensors and optimizers."""
    found = reached(job.loss, job.training_step)
    roots = list({id(each): each for each in (job.model, *found.modules)}.values())
    parameters = [tensor for root in roots for tensor in root.parameters()]
    optimizers = [inner(each) for each in (job.optimizer, *found.optimizers) if each is not None]
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for optimizer in optimizers
        for group in getattr(optimizer, "param_groups", ())
    ]
    states = [each for optimizer in optimizers for each in getattr(optimizer, "state", {}).values()]
    held: dict[str, list[torch.Tensor]] = {
        "parameters": [each for tensor in parameters for each in (tensor, *attached(tensor))],
        "buffers": [tensor for root in roots for tensor in root.buffers()],
        "gradients": [tensor.grad for tensor in parameters if tensor.grad is not None],
        "optimizer state": list(tensors((groups, states))),
        "batch": list(tensors(job.batch)),
    }
    return {
        **_of_tensors(held),
        "optimizer settings": [_plain(each) for each in (*groups, *states)],
    }


def harm(before: Digest, after: Digest) -> list[str]:
    """Name what is not as it was. Of threads, processes, files and memory only more than before counts."""
    changed = []
    for name, value in before.items():
        if name == "settings":
            changed += settings.differing(value, after[name])
        elif isinstance(value, set):
            changed += [name] if after[name] - value else []
        elif name == MEMORY:
            changed += [name] if after[name] - value > MEMORY_SLACK else []
        elif not settings.alike(value, after[name]):
            changed.append(name)
    return changed


def with_harm(trial: Trial, changed: Sequence[str]) -> Trial:
    """Note in the trial what else it changed outside its replicas, which makes its times doubtful too."""
    known = trial.harm if recorded(trial, "harm") else ()
    new = tuple(name for name in dict.fromkeys(changed) if name not in known)
    if not new:
        return msgspec.structs.replace(trial, harm=known)
    reason = "; ".join(filter(None, (trial.reason, what_harm(new))))
    return msgspec.structs.replace(
        trial, harm=(*known, *new), reason=reason, reliable=trial.reliable and NO_DOUBT.issuperset(new)
    )


def what_harm(names: Sequence[str]) -> str:
    """Word the harm as the reason why a trial is not to be relied on. What others may have made is not laid
    at its door."""
    its_own = [name for name in names if name not in NO_DOUBT]
    open_to_others = [name for name in names if name in NO_DOUBT]
    told = [f"it changed what it had to leave alone: {', '.join(its_own)}"] if its_own else []
    if open_to_others:
        told.append(
            f"more was there after it than before, which others may have made: {', '.join(open_to_others)}"
        )
    return "; ".join(told)


def _of_tensors(items: Mapping[str, Sequence[torch.Tensor]]) -> Digest:
    """Take identity and checksum of every tensor, each storage summed once."""
    sums: dict[int, torch.Tensor | None] = {}
    kept = {name: [part for each in held for part in parts(each)] for name, held in items.items()}
    with torch.no_grad():
        for part in (part for held in kept.values() for part in held):
            storage = part.untyped_storage()
            if storage._cdata not in sums:
                sums[storage._cdata] = _checksum(storage)
    numbers = _read(sums)
    return {
        name: [(id(each), *_version(each)) for each in items[name]]
        + [(part.untyped_storage()._cdata, numbers[part.untyped_storage()._cdata]) for part in held]
        for name, held in kept.items()
    }


def _version(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    shape = None
    with suppress(NotImplementedError, RuntimeError):  # a nested tensor has none
        shape = tuple(tensor.shape)
    return version, tensor.requires_grad, tensor.dtype, shape, tensor.device


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """List the plain tensors with data that a tensor is made of: itself, or what a subclass wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):  # a DTensor names its mesh too
                yield from parts(inner)
    elif has_data(tensor) and tensor.layout is torch.strided:
        with suppress(NotImplementedError, RuntimeError):
            tensor.untyped_storage().data_ptr()
            yield tensor


def _checksum(storage: torch.UntypedStorage) -> torch.Tensor | None:
    """Sum the storage's bytes in words, as a tensor on its device; None for one without bytes."""
    if not storage.nbytes():
        return None
    octets = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    size, dtype = next((size, dtype) for size, dtype in WORDS if storage.data_ptr() % size == 0)
    whole = octets.numel() // size * size
    return octets[:whole].view(dtype).sum(dtype=torch.int64) * 31 + octets[whole:].sum(dtype=torch.int64)


def _read(sums: Mapping[int, torch.Tensor | None]) -> dict[int, int | None]:
    """Read the numbers with one transfer per device."""
    numbers: dict[int, int | None] = dict.fromkeys(sums)
    for device in {each.device for each in sums.values() if each is not None}:
        keys = [key for key, each in sums.items() if each is not None and each.device == device]
        numbers.update(
            zip(
                keys,
                torch.stack([each for key in keys if (each := sums[key]) is not None]).tolist(),
                strict=True,
            )
        )
    return numbers


def attached(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List tensors that are kept at a parameter, such as Megatron's ``main_grad``."""
    return [value for value in getattr(tensor, "__dict__", {}).values() if isinstance(value, torch.Tensor)]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str, tuple, type(None)))
    }


def _of_a_library(thread: threading.Thread) -> bool:
    """Whether a library keeps the thread for itself, which is no harm.

    Python did not start it, as the one in which autograd runs a backward on a GPU: it becomes known when a
    Function of Transformer Engine asks for the current thread. Or what it runs is an installed library's, as
    Inductor's timer, which stops idle compile workers and then ends.
    """
    if isinstance(thread, threading._DummyThread):
        return True
    module = getattr(getattr(thread, "_target", None) or type(thread).run, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not LIBRARIES.isdisjoint(Path(file).parts) and module.partition(".")[0] != "fp8doctor"


def _children() -> set[str]:
    """List the child processes, where the system tells; reading ``multiprocessing`` instead would reap
    them."""
    found: set[str] = set()
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(file.read().split())
    return found


def _open_files() -> set[str]:
    """List regular files that are held open, by path; devices and pipes of a driver are not files."""
    return (
        set(_regular(f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")))
        if os.path.isdir("/proc/self/fd")
        else set()
    )


def _regular(links: Iterable[str]) -> Iterator[str]:
    for link in links:
        with suppress(OSError):
            if stat.S_ISREG(os.stat(link).st_mode):
                yield os.readlink(link)


def _folder() -> set[str]:
    with suppress(OSError):
        return set(os.listdir())
    return set()


def _allocated() -> int:
    """Count the bytes that torch holds on all GPUs, where CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
