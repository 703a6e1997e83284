"""Put the process, the user's model and the GPU's memory back as they were, and name what a trial changed.

Reading settings makes no CUDA context and imports no package. A setting that this torch or machine lacks is
left out.
"""

import gc
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import CodeType
from typing import Any

import msgspec
import torch

from fp8doctor.facts import Trial, recorded
from fp8doctor.facts.trial import GREW
from fp8doctor.loading.job import Job
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import te_private, torch_private
from fp8doctor.stacks.te_private import autocast_is_open
from fp8doctor.stacks.torch_private import compiled_entries
from fp8doctor.stacks.transformer_engine import autocast_with
from fp8doctor.trial.state.users import Contents, PutBack, contents, noted_objects, put_back, refill, restore

_log = logging.getLogger("fp8doctor")

Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions to read it, and to put back what was read."""


def _noted(read: Callable[[], Any], write: Callable[[Any], object]) -> PutBack | None:
    try:
        before = read()
    except Exception:
        _log.debug("a setting cannot be read", exc_info=True)
        return None

    def put_back() -> tuple[str, ...]:
        write(before)
        return ()

    return put_back


def _settings() -> Iterator[Setting]:
    yield lambda: dict(os.environ), partial(_write_container, os.environ)
    yield sys.path.copy, partial(_write_container, sys.path)
    yield random.getstate, random.setstate
    yield torch.get_rng_state, torch.set_rng_state
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    if numpy := sys.modules.get("numpy"):
        yield numpy.random.get_state, numpy.random.set_state
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch_private.default_device, _write_default_device
    for device in ("cpu", "cuda"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    for name, hooks in list(vars(torch.nn.modules.module).items()):
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield hooks.copy, partial(_write_container, hooks)
    yield lambda: contents(_te_attributes()), _write_te
    # What torch.compile keeps elsewhere or has not loaded is left out.
    counters, metrics = torch_private.all_counters(), torch_private.compilation_metrics()
    if counters is not None:
        copied = lambda: {group: counted.copy() for group, counted in counters.items()}  # noqa: E731
        yield copied, partial(_write_container, counters)
    if metrics is not None:
        yield partial(list, metrics), partial(_write_container, metrics)
    for name in torch_private.CONFIGS:
        if config := sys.modules.get(name):
            yield config.get_config_copy, partial(_write_config, config)
    yield torch_private.stance, torch_private.set_stance


def _write_container(container: Any, before: Any) -> None:
    if container != before:
        refill(container, before)


def _write_default_device(before: Any) -> None:
    """Set it only if it differs: that of a ``with torch.device(...)`` would stay on."""
    if before != torch_private.default_device():
        torch.set_default_device(before)


def _write_config(config: Any, before: Mapping[str, Any]) -> None:
    now = config.get_config_copy()
    for key, value in before.items():
        if now.get(key) != value:
            setattr(config, key, value)


def _te_attributes() -> dict[str, Any]:
    """Collect the plain attributes of Transformer Engine's state."""
    state = te_private.state()
    names = getattr(type(state), "__slots__", None) or list(getattr(state, "__dict__", ()))
    values = {name: getattr(state, name, None) for name in names if not name.startswith("_")}
    return {name: value for name, value in values.items() if not callable(value)}


def _write_te(before: Contents) -> None:
    attributes = _te_attributes()
    for name in restore(attributes, before):
        if name in before:
            setattr(te_private.state(), name, attributes[name])


Buffers = dict[str, dict[str, Any]]
"""Name of a global buffer -> its replacement for some replicas."""


@contextmanager
def buffers_apart(own: Buffers | None = None) -> Iterator[None]:
    """Use the global buffers of ``own`` inside, which gets an empty one for each that it lacks.

    Whenever an autocast closes, or its backward ends, Transformer Engine updates the scales of every module
    that ever registered in its global buffers. So each timed replica has buffers of its own.
    """
    state, own = te_private.state(), {} if own is None else own
    kept = {
        name: getattr(state, name)
        for name in te_private.BUFFERS
        if isinstance(getattr(state, name, None), dict)
    }
    for name in kept:
        setattr(state, name, own.setdefault(name, {}))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(state, name, value)


def open_autocast() -> Callable[[], AbstractContextManager[object]]:
    """Return a context that opens the current autocast again, or an empty one if none is open."""
    return partial(autocast_with, te_private.open_recipe()) if autocast_is_open() else nullcontext


MEMORY = "memory of the GPU"

CONTEXT = "the GPU's context in this process, which is unusable now"

MEMORY_SLACK = 64 * 2**20
"""Bytes of GPU memory that may be held in addition: cuBLAS workspaces and small constants. A choice."""


@contextmanager
def trial_modes() -> Iterator[None]:
    """Have gradients on and warnings hidden, and leave Transformer Engine's buffers alone."""
    with buffers_apart(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def restored(job: Job) -> Iterator[list[str]]:
    """Put back everything that replicas may change, also after an interrupt.

    Settings are put back silently, because a user's own forward may change them. Changes of the user's model
    are named in the list that the context gives. Inside are `trial_modes`, which put autograd's modes back.
    """
    torch_private.load_dynamo()  # whose settings are read
    settings = [noted for each in _settings() if (noted := _noted(*each)) is not None]
    objects, allocated = noted_objects(job), _allocated()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    pools = {*torch_private.compile_pools()}
    compiled = [(code, compiled_entries(code)) for code in torch_private.seen_codes()]
    named: list[str] = []
    last_first = ExitStack()  # goes on if one fails, and raises its exception at the end

    def stop_new_pools() -> None:
        for pool in sorted({*torch_private.compile_pools()} - pools):
            torch_private.stop_pool(pool)

    def leave() -> None:
        with signals_deferred():
            last_first.close()

    last_first.callback(lambda: named.extend([MEMORY] if _allocated() - allocated > MEMORY_SLACK else []))
    last_first.callback(put_back, settings)
    last_first.callback(lambda: named.extend(_forget_compiled(compiled)))
    last_first.callback(stop_new_pools)
    last_first.callback(lambda: named.extend(f"{name} (put back)" for name in put_back(objects)))
    try:
        try:
            with signals_deferred():
                last_first.enter_context(trial_modes())
            yield named
        finally:
            leave()
    finally:
        leave()  # what is left if an interrupt came before signals were deferred
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _forget_compiled(before: Sequence[tuple[CodeType, list[CodeType]]]) -> list[str]:
    """Forget Dynamo's entries of code that had none; a new one next to the user's own stays, and is named."""
    had = {id(code) for code, entries in before if entries}
    for code in torch_private.seen_codes():
        if id(code) not in had and compiled_entries(code):
            torch_private.reset_code(code)
    torch.clear_autocast_cache()
    as_before = all({*map(id, entries)} == {*map(id, compiled_entries(code))} for code, entries in before)
    return [] if as_before else ["compiled code of the model"]


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
