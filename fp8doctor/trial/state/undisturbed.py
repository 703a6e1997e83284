"""Leave the process, the user's model and the GPU's memory as they were, and report what a trial changed.

`ProcessSnapshot` puts everything back, whether the trial returns or raises. A digest before and after it
names what could not be put back: the trial's harm. A digest knows a tensor by its identity, version counter
and a checksum of its bytes, taken on its own device: 0.1 s per GiB on two CPU cores and 13 ms more for the
291 tensors of an 8B Llama (measured); 16 GiB in 5 ms on a GPU at 3.3 TB/s (computed). The checksum is a sum
of 64-bit words. It sees writes that no version counter counts (``.data``, kernels called by address), but not
a permutation.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import torch

from fp8doctor.examine.torch_state import not_the_users
from fp8doctor.facts import Trial, recorded
from fp8doctor.facts.trial import GREW
from fp8doctor.loading.job import Job
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.tensors import has_data, tensors
from fp8doctor.trial.state import library_state, process_settings
from fp8doctor.trial.state.library_state import buffers_apart
from fp8doctor.trial.state.user_state import OptimizerSettings, UserObjects, UsersOwn, of_the_job, settings_of


class ProcessSnapshot:
    """Put back everything that replicas may change, also after an interrupt.

    The process's settings (random numbers, flags, variables) are put back silently, because a user's own
    forward may change them. Changes of the user's model are put back, then named in the list that the context
    gives. Inside, gradients are on and warnings are hidden: replicas say nothing that the model itself would
    not.

    Enter it twice, ``with kept, kept``: an interrupt may come just when the first begins to put back, and
    then the second does it.
    """

    def __init__(self, job: Job) -> None:
        torch_private.load_dynamo()  # whose settings are read
        self._named: list[str] = []
        self._settings = process_settings.read()
        self._pools = {*torch_private.compile_pools()}
        self._monitor = library_state.monitor_of_bars()
        self._handlers = self._settings.pop(process_settings.HANDLERS, {})
        users = of_the_job(job)
        self._optimizers, self._objects = OptimizerSettings(users.optimizers), UserObjects(users)
        self._entries = library_state.Entries(job.model, job.loss, job.training_step)
        self._around = ExitStack()
        self._entered = self._left = False

    def __enter__(self) -> list[str]:
        try:
            with signals_deferred():
                if not self._entered:
                    self._entered = True
                    self._around.enter_context(not_the_users())
                    self._around.enter_context(buffers_apart())
                    self._around.enter_context(warnings.catch_warnings())
                    self._around.enter_context(torch.inference_mode(False))
                    self._around.enter_context(torch.enable_grad())
                    warnings.simplefilter("ignore")
            return self._named
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        finally:  # an interrupt may have come before signals were deferred
            self._leave()

    def _leave(self) -> None:
        process_settings.write_handlers(self._handlers)
        with signals_deferred():
            if not self._left:
                self._put_back()
                self._left = True

    def _put_back(self) -> None:
        """Put everything back, also if one part fails; its exception is raised at the end."""
        with ExitStack() as last_first:
            last_first.callback(self._forget_compiled)
            for pool in sorted({*torch_private.compile_pools()} - self._pools):
                last_first.callback(torch_private.stop_pool, pool)
            if self._monitor is None:
                last_first.callback(library_state.stop_monitor_of_bars)
            last_first.callback(process_settings.put_back, self._settings)
            last_first.callback(self._put_users_objects_back)
            last_first.callback(self._around.close)

    def _put_users_objects_back(self) -> None:
        self._named += [f"{name} (put back)" for name in self._objects.put_back()]
        if self._optimizers.put_back():
            self._named.append("optimizer settings (put back)")

    def _forget_compiled(self) -> None:
        if not self._entries.put_back():
            self._named.append("compiled code of the model")
        if any(self._settings.get(f"autocast: {device}") is True for device in ("cpu", "cuda")):
            torch.clear_autocast_cache()


def free(device: torch.device) -> None:
    """Give memory back, and cuBLAS's workspaces (66 MiB on an H200) if torch can free them."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch_private.clear_cublas_workspaces()
            torch.cuda.empty_cache()


MEMORY = "memory of the GPU"

CONTEXT = "the GPU's context in this process, which is unusable now"

NO_DOUBT = frozenset({MEMORY})
"""Changes that another thread may have made, and that do not disturb timing."""

MEMORY_SLACK = 64 * 2**20
"""Bytes of GPU memory that may be held in addition: cuBLAS workspaces and small constants. A choice."""

Digest = dict[str, Any]
"""Item -> a value to compare."""

WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def digest(job: Job, users: UsersOwn) -> Digest:
    """Read the state of the job and its process, by the name of each item."""
    return {
        **of_the_users(job, users),
        "settings": process_settings.read(),
        MEMORY: _allocated(),
    }


def of_the_users(job: Job, users: UsersOwn) -> Digest:
    """Read the part of the state that is the user's own: tensors, and optimizers of `of_the_job`."""
    roots, optimizers, trained = users
    parameters = [*(tensor for root in roots for tensor in root.parameters()), *trained]
    groups = [group for optimizer in optimizers for group in settings_of(optimizer)]
    states = [each for optimizer in optimizers for each in getattr(optimizer, "state", {}).values()]
    held: dict[str, list[torch.Tensor]] = {
        "parameters": [each for tensor in parameters for each in (tensor, *attached(tensor))],
        "buffers": [tensor for root in roots for tensor in root.buffers()],
        "gradients": [each.grad for each in parameters if each.is_leaf and each.grad is not None],
        "optimizer state": list(tensors((groups, states))),
        "batch": list(tensors(job.batch)),
    }
    return {
        **_of_tensors(held),
        "optimizer settings": [_plain(each) for each in (*groups, *states)],
    }


def harm(before: Digest, after: Digest) -> list[str]:
    """Name what changed. Memory counts only if there is more than before."""
    changed = []
    for name, value in before.items():
        if name == "settings":
            changed += process_settings.differing(value, after[name])
        elif name == MEMORY:
            changed += [name] if after[name] - value > MEMORY_SLACK else []
        elif not process_settings.alike(value, after[name]):
            changed.append(name)
    return changed


def with_harm(trial: Trial, changed: Sequence[str]) -> Trial:
    """Add changes outside the replicas to the trial; they make its times doubtful too."""
    known = trial.harm if recorded(trial, "harm") else ()
    new = tuple(name for name in dict.fromkeys(changed) if name not in known)
    if not new:
        return msgspec.structs.replace(trial, harm=known)
    reason = "; ".join(filter(None, (trial.reason, what_harm(new))))
    return msgspec.structs.replace(
        trial, harm=(*known, *new), reason=reason, reliable=trial.reliable and NO_DOUBT.issuperset(new)
    )


def what_harm(names: Sequence[str]) -> str:
    """Word the harm as a reason against the trial; others may have made the items of `NO_DOUBT`."""
    its_own = [name for name in names if name not in NO_DOUBT]
    open_to_others = [name for name in names if name in NO_DOUBT]
    reasons = [f"it changed what it had to leave alone: {', '.join(its_own)}"] if its_own else []
    if open_to_others:
        reasons.append(f"{GREW}{', '.join(open_to_others)}")
    return "; ".join(reasons)


def _of_tensors(items: Mapping[str, Sequence[torch.Tensor]]) -> Digest:
    """Read identity and checksum of every tensor; each storage is summed once."""
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
    """List the plain tensors with data in a tensor: itself, or those that a subclass wraps."""
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
        stacked = torch.stack([each for key in keys if (each := sums[key]) is not None])
        numbers.update(zip(keys, stacked.tolist(), strict=True))
    return numbers


def attached(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List tensors that are attached to a parameter, such as Megatron's ``main_grad``."""
    return [value for value in getattr(tensor, "__dict__", {}).values() if isinstance(value, torch.Tensor)]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str, tuple, type(None)))
    }


def _allocated() -> int:
    """Count the bytes that torch holds on all GPUs; 0 if CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
