"""Read process-wide settings of Python, torch, torch.compile and Transformer Engine, and put them back.

Reading changes nothing: it makes no CUDA context and imports no package. A setting that this torch or machine
lacks is left out. A setting is written only if it differs.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from fp8doctor.stacks import te_private, torch_private
from fp8doctor.stacks.te_private import autocast_is_open
from fp8doctor.stacks.transformer_engine import autocast_with
from fp8doctor.trial.state.users import Contents, PutBack, contents, refill, restore

_log = logging.getLogger("fp8doctor")

AUTOCAST_DEVICES = ("cpu", "cuda")

FLAGS = """
    fp32_precision cuda.matmul.fp32_precision cudnn.fp32_precision cudnn.conv.fp32_precision
    cudnn.rnn.fp32_precision mkldnn.fp32_precision mkldnn.matmul.fp32_precision mkldnn.conv.fp32_precision
    mkldnn.rnn.fp32_precision cuda.matmul.allow_tf32 cuda.matmul.allow_fp16_reduced_precision_reduction
    cuda.matmul.allow_bf16_reduced_precision_reduction cuda.matmul.allow_fp16_accumulation cudnn.allow_tf32
    cudnn.enabled cudnn.benchmark cudnn.benchmark_limit cudnn.deterministic mkldnn.enabled
    mkldnn.deterministic
""".split()
"""Attributes of ``torch.backends``. One that cannot be read is left out, as ``allow_tf32`` may be since torch
2.9, which also has ``fp32_precision``."""

ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
"""``torch.backends.cuda.NAME_enabled`` and ``enable_NAME``."""

Setting = tuple[str, Callable[[], Any], Callable[[Any], object]]
"""Name in a report, and functions to read and to write it."""


def noted_settings() -> list[PutBack]:
    """Note every setting that can be read."""
    return [put_back for each in _settings() if (put_back := _noted(*each)) is not None]


def _noted(name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> PutBack | None:
    try:
        before = read()
    except Exception:
        _log.debug("%s cannot be read", name, exc_info=True)
        return None

    def put_back() -> Iterator[str]:
        if not alike(before, read()):
            yield name.partition(":")[0]
            write(before)

    return put_back


def alike(a: Any, b: Any) -> bool:
    """Return whether two values, which may hold tensors and arrays, are the same.

    The same object is not read: it may hold NaN, or be on a GPU that is lost.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _settings() -> Iterator[Setting]:
    yield "environment variables", lambda: dict(os.environ), partial(refill, os.environ)
    yield "sys.path", sys.path.copy, partial(refill, sys.path)
    yield "random numbers: Python", random.getstate, random.setstate
    yield "random numbers: torch", torch.get_rng_state, torch.set_rng_state
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield "random numbers: CUDA", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    if numpy := sys.modules.get("numpy"):
        yield "random numbers: NumPy", numpy.random.get_state, numpy.random.set_state
    yield from _of_torch()
    yield from _of_compilation()
    yield "FP8 state of Transformer Engine", lambda: contents(_te_attributes()), _write_te


def _of_torch() -> Iterator[Setting]:
    yield "the default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "the default device", torch_private.default_device, torch.set_default_device
    yield "grad mode", torch.is_grad_enabled, torch.set_grad_enabled
    get_mode, set_mode = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield "deterministic algorithms", get_mode, set_mode
    yield "the number of threads", torch.get_num_threads, torch.set_num_threads
    name = "precision and backend flags"
    yield f"{name}: matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    fill = "utils.deterministic.fill_uninitialized_memory"
    for path in (fill, *(f"backends.{flag}" for flag in FLAGS)):
        yield f"{name}: {path}", partial(attrgetter(path), torch), partial(_write_flag, path)
    for kind in ATTENTION:
        read_it, write = (
            getattr(torch.backends.cuda, each) for each in (f"{kind}_enabled", f"enable_{kind}")
        )
        yield f"{name}: {kind}", read_it, write
    for name, hooks in list(vars(torch.nn.modules.module).items()):
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"global module hooks: {name}", hooks.copy, partial(refill, hooks)
    for device in AUTOCAST_DEVICES:
        get, put = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield f"autocast: {device}", get, put
        get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
        yield f"autocast: {device} dtype", partial(get_dtype, device), partial(set_dtype, device)
    yield "autocast: cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


def _write_flag(path: str, value: Any) -> None:
    holder, _, flag = path.rpartition(".")
    setattr(attrgetter(holder)(torch), flag, value)


def _of_compilation() -> Iterator[Setting]:
    """Yield what torch.compile keeps; what it keeps elsewhere or has not loaded is left out."""
    counters, metrics = torch_private.all_counters(), torch_private.compilation_metrics()
    if counters is not None:
        copied = partial(_copied_counters, counters)
        yield "counters of torch.compile", copied, partial(refill, counters)
    if metrics is not None:
        yield "metrics of torch.compile", partial(list, metrics), partial(refill, metrics)
    for name in torch_private.CONFIGS:
        if config := sys.modules.get(name):
            read_it, write = config.get_config_copy, partial(_write_config, config)
            yield f"settings of torch.compile: {name}", read_it, write
    yield "stance of torch.compile", torch_private.stance, torch_private.set_stance


def _copied_counters(counters: Mapping[str, Any]) -> dict[str, Any]:
    return {group: counted.copy() for group, counted in counters.items()}


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
