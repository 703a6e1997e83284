"""Put the process and the user's model back as they were, and name what a trial changed of the model.

Reading settings makes no CUDA context and imports no package. A setting that this torch or machine lacks is
left out.
"""

import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from fp8doctor.facts import Trial
from fp8doctor.loading.job import Job
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private, transformer_engine
from fp8doctor.stacks.torch_private import compiled_entries
from fp8doctor.stacks.transformer_engine import autocast_is_open, autocast_with
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.users import Contents, PutBack, contents, noted_objects, put_back, restore

_log = logging.getLogger("fp8doctor")

Setting = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions to read it, and to put back what was read."""


def _noted(read: Callable[[], Any], write: Callable[[Any], None]) -> PutBack | None:
    try:
        return partial(write, read())
    except Exception:
        _log.debug("a setting cannot be read", exc_info=True)
        return None


def _settings() -> Iterator[Setting]:
    yield sys.path.copy, partial(sys.path.__setitem__, slice(None))
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
    yield lambda: contents(_te_attributes()), _write_te


def _write_default_device(before: Any) -> None:
    """Set it only if it differs: that of a ``with torch.device(...)`` would stay on."""
    if before != torch_private.default_device():
        torch.set_default_device(before)


def _te_attributes() -> dict[str, Any]:
    """Collect the plain attributes of Transformer Engine's state."""
    state = transformer_engine.state()
    names = getattr(type(state), "__slots__", None) or list(getattr(state, "__dict__", ()))
    values = {name: getattr(state, name, None) for name in names if not name.startswith("_")}
    return {name: value for name, value in values.items() if not callable(value)}


def _write_te(before: Contents) -> None:
    attributes = _te_attributes()
    for name in restore(attributes, before):
        if name in before:
            setattr(transformer_engine.state(), name, attributes[name])


Buffers = dict[str, dict[str, Any]]
"""Name of a global buffer -> its replacement for some replicas."""


@contextmanager
def buffers_apart(own: Buffers | None = None) -> Iterator[None]:
    """Use the global buffers of ``own`` inside, which gets an empty one for each that it lacks.

    Whenever an autocast closes, or its backward ends, Transformer Engine updates the scales of every module
    that ever registered in its global buffers. So each timed replica has buffers of its own.
    """
    state, own = transformer_engine.state(), {} if own is None else own
    kept = {
        name: getattr(state, name)
        for name in transformer_engine.BUFFERS
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
    return partial(autocast_with, transformer_engine.open_recipe()) if autocast_is_open() else nullcontext


CONTEXT = "the GPU's context in this process, which is unusable now"


@contextmanager
def trial_modes() -> Iterator[None]:
    """Have gradients on and warnings hidden, and leave Transformer Engine's buffers alone."""
    with buffers_apart(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def restored(job: Job, guard: Guard) -> Iterator[list[str]]:
    """Put back everything that replicas may change, also after an interrupt.

    Settings are put back silently, because a user's own forward may change them. Changes of the user's model
    are named in the list that the context gives. Inside are `trial_modes`, and the guard stands.
    """
    settings = [noted for each in _settings() if (noted := _noted(*each)) is not None]
    objects = noted_objects(job)
    pools = {*torch_private.compile_pools()}
    compiled = {id(code): code for code in torch_private.seen_codes() if compiled_entries(code)}
    named: list[str] = []
    last_first = ExitStack()  # goes on if one fails, and raises its exception at the end

    def forget_compiled() -> None:
        for code in torch_private.seen_codes():
            if id(code) not in compiled and compiled_entries(code):
                torch_private.reset_code(code)
        torch.clear_autocast_cache()
        for pool in sorted({*torch_private.compile_pools()} - pools):
            torch_private.stop_pool(pool)

    def leave() -> None:
        with signals_deferred():
            last_first.close()

    last_first.callback(put_back, settings)
    last_first.callback(forget_compiled)
    last_first.callback(lambda: named.extend(put_back(objects)))
    try:
        try:
            with signals_deferred():
                last_first.enter_context(guard.standing())
                last_first.enter_context(trial_modes())
            yield named
        finally:
            leave()
    finally:
        leave()  # what is left if an interrupt came before signals were deferred


def free(device: torch.device) -> None:
    """Give memory back, and cuBLAS's workspaces (66 MiB on an H200) if torch can free them."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch_private.clear_cublas_workspaces()
            torch.cuda.empty_cache()


def with_harm(trial: Trial, changed: Sequence[str]) -> Trial:
    """Add changes outside the replicas to the trial; they make its times doubtful too."""
    if not changed:
        return replace(trial, harm=())
    said = f"it changed what it had to leave alone: {', '.join(changed)}"
    reason = f"{trial.reason}; {said}" if trial.reason else said
    return replace(trial, harm=tuple(changed), reason=reason, reliable=False)
