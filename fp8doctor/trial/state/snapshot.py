"""Leave the process, the user's model and the GPU's memory as they were, and report what a trial changed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType

import msgspec
import torch

from fp8doctor.examine.torch_state import not_the_users
from fp8doctor.facts import Trial, recorded
from fp8doctor.facts.trial import GREW
from fp8doctor.loading.job import Job
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import compiled_entries
from fp8doctor.trial.state.settings import buffers_apart, noted_settings
from fp8doctor.trial.state.users import noted_objects, put_back

MEMORY = "memory of the GPU"

CONTEXT = "the GPU's context in this process, which is unusable now"

MEMORY_SLACK = 64 * 2**20
"""Bytes of GPU memory that may be held in addition: cuBLAS workspaces and small constants. A choice."""


@contextmanager
def restored(job: Job) -> Iterator[list[str]]:
    """Put back everything that replicas may change, also after an interrupt.

    Settings are put back silently, because a user's own forward may change them. Changes of the user's model
    are named in the list that the context gives; so is what cannot be put back. Inside, gradients are on and
    warnings are hidden.
    """
    torch_private.load_dynamo()  # whose settings are read
    settings, objects, allocated = noted_settings(), noted_objects(job), _allocated()
    pools = {*torch_private.compile_pools()}
    compiled = [(code, compiled_entries(code)) for code in torch_private.seen_codes()]
    named: list[str] = []
    last_first = ExitStack()  # goes on if one fails, and raises its exception at the end

    def leave() -> None:
        with signals_deferred():
            last_first.close()

    last_first.callback(lambda: named.extend([MEMORY] if _allocated() - allocated > MEMORY_SLACK else []))
    last_first.callback(lambda: named.extend(put_back(settings)))
    last_first.callback(put_back, settings)
    last_first.callback(put_back, settings)  # precision settings change each other
    last_first.callback(lambda: named.extend(_forget_compiled(compiled)))
    last_first.callback(_stop_pools, pools)
    last_first.callback(lambda: named.extend(f"{name} (put back)" for name in put_back(objects)))
    try:
        try:
            with signals_deferred():
                last_first.enter_context(not_the_users())
                last_first.enter_context(buffers_apart())
                last_first.enter_context(warnings.catch_warnings())
                last_first.enter_context(torch.inference_mode(False))
                last_first.enter_context(torch.enable_grad())
                warnings.simplefilter("ignore")
            yield named
        finally:
            leave()
    finally:
        leave()  # what is left if an interrupt came before signals were deferred


def _forget_compiled(before: Sequence[tuple[CodeType, list[CodeType]]]) -> list[str]:
    """Forget Dynamo's entries of code that had none; a new one next to the user's own stays, and is named."""
    had = {id(code) for code, entries in before if entries}
    for code in torch_private.seen_codes():
        if id(code) not in had and compiled_entries(code):
            torch_private.reset_code(code)
    torch.clear_autocast_cache()
    as_before = all({*map(id, entries)} == {*map(id, compiled_entries(code))} for code, entries in before)
    return [] if as_before else ["compiled code of the model"]


def _stop_pools(before: set[str]) -> None:
    for pool in sorted({*torch_private.compile_pools()} - before):
        torch_private.stop_pool(pool)


def free(device: torch.device) -> None:
    """Give memory back, and cuBLAS's workspaces (66 MiB on an H200) if torch can free them."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch_private.clear_cublas_workspaces()
            torch.cuda.empty_cache()


def _allocated() -> int:
    """Count the bytes that torch holds on all GPUs; 0 if CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))


def with_harm(trial: Trial, changed: Sequence[str]) -> Trial:
    """Add changes outside the replicas to the trial; they make its times doubtful too."""
    known = trial.harm if recorded(trial, "harm") else ()
    new = tuple(name for name in dict.fromkeys(changed) if name not in known)
    if not new:
        return msgspec.structs.replace(trial, harm=known)
    own = [name for name in new if name != MEMORY]  # which another thread may take, and costs no time
    reasons = [trial.reason] if trial.reason else []
    if own:
        reasons.append(f"it changed what it had to leave alone: {', '.join(own)}")
    if MEMORY in new:
        reasons.append(f"{GREW}{MEMORY}")
    return msgspec.structs.replace(
        trial, harm=(*known, *new), reason="; ".join(reasons), reliable=trial.reliable and not own
    )
